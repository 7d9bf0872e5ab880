"""Names of a host's framework that may change are in its `compat` alone, as are its versions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("moe_plugin", "scripts/bench", "scripts/emulate", "scripts/audit")
FRAMEWORKS = ("megatron", "fairseq", "fairseq_cli", "transformers")
# What every module may import: module -> names
STABLE = {
    "megatron.core": {"parallel_state", "tensor_parallel", "dist_checkpointing"},
    "megatron.core.tensor_parallel": {"get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"},
    "fairseq": {"metrics"},
    "fairseq.criterions": {"register_criterion"},
    "fairseq.dataclass": {"ChoiceEnum", "FairseqDataclass"},
    "transformers": {"AutoModelForCausalLM", "FineGrainedFP8Config", "MixtralConfig",
                     "Mxfp4Config"},
    "transformers.distributed": {"DistributedConfig"},
    "fairseq.models": {"register_model", "register_model_architecture"},
}
# (file, name): why it is not part of `compat`
ELSEWHERE = {
    ("moe_plugin/checkpoint/formats/megatron/source.py", "megatron.core.safe_globals.SAFE_GLOBALS"):
        "the format reads without Megatron, and takes its list of classes where it is installed",
    ("scripts/bench/peers/transformers.py",
     "transformers.models.mixtral.modeling_mixtral.MixtralExperts"): "it is what is measured",
    ("scripts/bench/peers/transformers.py", "transformers.distributed.expert_parallel.AllToAllEP"):
        "it is what is measured",
}
VERSION = re.compile(r"(?<![\d.])0\.1[2-9](?:\.\d)?(?![\d%])")


def outside() -> Iterator[Path]:
    """Our files that are not part of a `compat`, nor a script like those of a host's users."""
    return (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
            if not {"compat", "examples"}.intersection(path.parts))


def unstable(code: str) -> list[str]:
    """What a file imports of a framework besides the stable names."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name.split(".")[0] in FRAMEWORKS
                      and one.name != "transformers"]  # its exports are stable
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            if module.split(".")[0] in FRAMEWORKS:
                found += [f"{module}.{one.name}" for one in node.names
                          if one.name not in STABLE.get(module, ())]
    return found


def test_only_compat_imports_what_may_change():
    found = {(path.relative_to(ROOT).as_posix(), name)
             for path in outside() for name in unstable(path.read_text(encoding="utf-8"))}
    assert sorted(found) == sorted(ELSEWHERE)


def test_only_compat_of_a_host_knows_its_versions():
    found = [f"{path.relative_to(ROOT)}: {line.strip()}" for path in outside()
             if "hosts" in path.parts
             for line in path.read_text(encoding="utf-8").splitlines() if VERSION.search(line)]
    assert found == []


@pytest.mark.parametrize("code, expected", [
    ("from megatron.core import parallel_state as ps", []),
    ("from megatron.core.utils import get_model_config", ["megatron.core.utils.get_model_config"]),
    ("def f():\n    import fairseq.benchmark", ["fairseq.benchmark"]),
    ("from moe_plugin.hosts.megatron.compat.names import GPTModel", []),
])
def test_finds_imports_as_they_are_written(code, expected):
    assert unstable(code) == expected


@pytest.mark.parametrize("host, framework", [
    pytest.param("megatron", "megatron.core", marks=pytest.mark.megatron),
    pytest.param("fairseq", "fairseq", marks=pytest.mark.fairseq)])
def test_every_name_of_a_table_is_there(host, framework):
    from importlib import import_module

    pytest.importorskip(framework)
    names = import_module(f"moe_plugin.hosts.{host}.compat.names")
    for name in (*names.PLACE_OF, *names.MODULES):
        assert names.__getattr__(name) is not None
    with pytest.raises(AttributeError, match="dd (it|the name) to (its|the) table"):
        names.__getattr__("Nothing")
