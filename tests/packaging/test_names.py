"""Names and docstrings: private names, names of hosts' frameworks, a line for each argument."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.definitions import DEFINITION, imports, sources, trees_of_tests

# Tests ask for what users see: private names of the package are left alone, but for those listed.


# Whole files: they change the lines of functions, by name.
WHITE_BOX = {"fake_gpu/mutants.py"}
# Of other libraries, by names that ours have, too.
FOREIGN = {"_apply", "_experts_implementation", "_fields", "_library", "_quorum", "_version"}
ALLOWED = {
    ("faults/recorded.py", "_commit"): "a replica that fails where it agrees on a step",
    ("faults/test_steps_apart.py", "_commit"): "a replica that fails where it agrees on a step",
    ("hosts/fairseq/test_norms.py", "_check_grad_norms"): "what fairseq calls",
    ("training/resilience/test_peers.py", "_commit"): "a replica that fails where it agrees",
    ("training/resilience/test_peers.py", "_group"): "how many are in an average, while it is made",
    ("training/resilience/test_peers.py", "_kept"): "the outer optimizer's momenta are not public",
    ("training/resilience/test_peers.py", "_manager"): "torchft's, which is told of an error",
    ("training/resilience/test_swarm.py", "_backward"): "a peer that fails in this request",
    ("training/resilience/test_swarm.py", "_reduce"): "a peer that fails in this request",
    ("training/resilience/test_swarm.py", "_server"): "a server that takes no connection",
    ("training/resilience/test_swarm.py", "_took"): "a trainer that dies before this request",
    ("hosts/megatron/test_megatron_flags.py", "_table"): "the names in a checkpoint's files",
    ("kernels/test_workspace.py", "_lock"): "a thread that holds it while the process forks",
}
# Planted faults that no test of what users see finds in a short time.
PARTS = {
    ("checkpoint/test_fairseq_entries.py", "_state_of"),
    ("checkpoint/test_huggingface_files.py", "_block_rules"),
    ("checkpoint/test_live.py", "_check_layer"), ("checkpoint/test_live.py", "_state"),
    ("checkpoint/test_quantization.py", "_float8"), ("checkpoint/test_quantization.py", "_is_pair"),
    ("checkpoint/test_source.py", "_kv_heads"), ("checkpoint/test_source.py", "_table"),
    ("checkpoint/test_source.py", "_without_name"), ("comm/test_agreement.py", "_differences"),
    ("comm/test_agreement.py", "_values"), ("comm/test_gloo.py", "_GATHER"),
    ("comm/test_late_failures.py", "_pending"), ("comm/test_topology.py", "_Rows"),
    ("comm/test_watchdog.py", "_come"), ("dispatch/test_deepep.py", "_Send"),
    ("exactness/test_standing.py", "_marks"), ("exactness/test_standing.py", "_rows"),
    ("hosts/fairseq/test_training.py", "_reduce_and_log_stats"),
    ("hosts/fairseq/test_training.py", "_validating"),
    ("hosts/megatron/test_megatron_layer.py", "_as_native"),
    ("hosts/megatron/test_megatron_layer.py", "_as_ours"),
    ("hosts/megatron/test_megatron_layer.py", "_run_split"),
    ("hosts/megatron/test_megatron_layer.py", "_transposed"),
    ("hosts/plain/test_wrong_ranks.py", "_voted"), ("routing/test_counts.py", "_add_counts"),
    ("routing/test_routers.py", "_directions"),
    ("training/gradients/test_part_gradients.py", "_refuse_tied_groups"),
    ("tuning/test_compute_tuner.py", "_clean"), ("tuning/test_compute_tuner.py", "_not_before"),
    ("tuning/test_engine.py", "_goes_on"), ("tuning/test_engine.py", "_tried"),
    ("tuning/test_layout_tuner.py", "_choose"),
}


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name; empty for other expressions."""
    return getattr(node, "attr", getattr(node, "id", ""))


def private(name: str) -> bool:
    """Whether it begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that code defines: functions, classes, constants and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITION):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def used(tree: ast.AST) -> Iterator[str]:
    """Private names that a test's code takes from what is not its own `self` or `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found = [] if of_itself else [node.attr]
        elif isinstance(node, ast.Call) and name_of(node.func).endswith(("attr", "object")):
            found = [str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant)]
        else:
            found = [alias.name for alias, _ in imports(node)]
        yield from filter(private, found)


def test_tests_use_no_other_private_names():
    ours = {name for source in sources().values() for name in defined(source.tree)} - FOREIGN
    found = {(file, name) for file, tree in trees_of_tests().items() if file not in WHITE_BOX
             for name in used(tree) if name in ours}
    assert found == set(ALLOWED) | PARTS, "use what is public, or make public what two rooms need"


@pytest.mark.parametrize("code, expected", [
    ("layer._x + layer.experts._y", ["_y", "_x"]), ("from moe_plugin.comm.base import _x", ["_x"]),
    ("monkeypatch.setattr(build, '_x', 1)", ["_x"]), ("super()._x()", ["_x"]),
    ("patch.object(swap, '_x')", ["_x"]), ("self._x = cls._y", []), ("x.__dict__", []),
    ("from torch import _C", []), ("from tests.comm import _x", []),
])
def test_finds_private_names_as_they_are_written(code, expected):
    assert sorted(used(ast.parse(code))) == sorted(expected)


# Names of a host's framework that may change are in its `compat` alone, as are its versions.


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
    "transformers": {"AutoConfig", "AutoModelForCausalLM", "FineGrainedFP8Config", "MixtralConfig",
                     "Mxfp4Config"},
    "transformers.distributed": {"DistributedConfig"},
    "fairseq.models": {"register_model", "register_model_architecture"},
}
# (file, name): why it is not part of `compat`
ELSEWHERE = {
    ("moe_plugin/checkpoint/formats/megatron/source.py", "megatron.core.safe_globals.SAFE_GLOBALS"):
        "the format reads without Megatron, and takes its list of classes where it is installed",
    ("scripts/bench/peers/packages.py",
     "transformers.models.mixtral.modeling_mixtral.MixtralExperts"): "it is what is measured",
    ("moe_plugin/hosts/plain/adapters/trainer.py", "transformers.trainer_utils.rotate_checkpoints"):
        "both kinds of models of transformers are saved by it",
    ("scripts/bench/fine_tune_limit.py", "transformers.Qwen3MoeConfig"): "it is what is measured",
    ("scripts/bench/peers/packages.py", "transformers.distributed.expert_parallel.AllToAllEP"):
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


# A docstring has a line for each argument and attribute: no chain of `x: ...; y: ...`.


# Modules with chains that are left; the list only becomes shorter.
LEFT = {
    "moe_plugin.hosts.megatron.run", "moe_plugin.hosts.plain.run",
    "moe_plugin.hosts.timm.train", "moe_plugin.training.resilience.averaging_peers",
    "moe_plugin.tuning.layout_tuner", "moe_plugin.tuning.predicted",
}


def _described(node: ast.AST) -> Iterator[str]:
    """What a docstring may describe: parameters, and a class's fields and attributes."""
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            yield part.arg
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.attr
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id


def chains(tree: ast.AST) -> Iterator[str]:
    """Names that a docstring describes behind another one on the same line."""
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, DEFINITION) else None
        if not text:
            continue
        name = "|".join(map(re.escape, {*_described(node)})) or "-"
        entry = rf"(?:{name})(?:, (?:{name}))*: "
        for line in text.splitlines():
            if re.match(rf"\s*{entry}", line):
                yield from (f"{node.name}: {found}" for found in
                            re.findall(rf"[.;)] ({entry})", line))


def test_each_argument_has_a_line_of_its_own():
    found = [f"{name}.{chain}" for name, source in sources().items() if name not in LEFT
             for chain in chains(source.tree)]
    assert found == [], "one line for each, below `Args:` or `Attributes:`"


@pytest.mark.parametrize("text, expected", [
    ("x: one. y: two.", ["f: y: "]), ("x: one; y: two.", ["f: y: "]),
    ("Args:\n        x: one.\n        y: two.", []), ("x, y: both; None: neither.", []),
    ("Shapes. x: what it is.", []),
])
def test_finds_chains(text, expected):
    tree = ast.parse(f'def f(x, y):\n    """A function.\n\n    {text}\n    """\n')
    assert list(chains(tree)) == expected
