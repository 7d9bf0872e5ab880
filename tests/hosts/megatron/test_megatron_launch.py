"""The launcher, the specs for `--spec`, the flags, the CPU shim."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.megatron.ranks import ROOT, on_ranks, run_main
from tests.hosts.megatron.training import MODEL, arguments_of, options, own_loop


def test_launcher_without_a_script_says_what_it_wants(tmp_path: Path) -> None:
    said = run_main("moe_plugin.hosts.megatron.launch", ["no_such_script.py"], 1, tmp_path,
                    fails=True)
    assert "'no_such_script.py' not found" in said and "pretrain_gpt.py" in said


def test_spec_attributes_say_what_they_need_outside_a_script() -> None:
    from moe_plugin.hosts.megatron import spec

    for name in ("moe_layer", "moe_layer_local"):
        with pytest.raises(ValueError, match="needs the arguments of Megatron's.*swap_moe"):
            vars(spec)[name](None)


def test_spec_takes_a_yaml_file(tmp_path: Path) -> None:
    from moe_plugin.hosts.megatron.spec import script_spec

    (tmp_path / "moe.yaml").write_text("dispatch: {name: padded}\n")
    assert "'dispatch.name': 'padded'" in repr(script_spec(str(tmp_path / "moe.yaml")))
    (tmp_path / "bad.yaml").write_text("dispatch: {nam: padded}\n")
    with pytest.raises(ValueError, match="unknown key 'dispatch.nam'"):
        script_spec(str(tmp_path / "bad.yaml"))


@own_loop
def test_native_argument_table_names_paths_of_the_tree() -> None:
    from moe_plugin.config.flags import flag_specs
    from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS

    assert set(NATIVE_ARGUMENTS) <= {spec.path for spec in flag_specs()}
    named = {one for native in NATIVE_ARGUMENTS.values() for one in native.split(", ")}
    assert named <= {*options()}


def test_configs_are_valid() -> None:
    from moe_plugin.config import settings_from_yaml
    from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS

    files = sorted(Path(ROOT, "configs", "megatron").glob("*.yaml"))
    assert files
    for file in files:
        assert not set(settings_from_yaml(str(file))) & set(NATIVE_ARGUMENTS), file


def test_every_cpu_patch_states_versions_and_reason() -> None:
    from moe_plugin.hosts.megatron.compat import cpu, script_cpu

    assert len(cpu.PATCHES) >= 7 and len(script_cpu.PATCHES) >= 4
    for patch in (*cpu.PATCHES, *script_cpu.PATCHES):
        assert patch.versions and len(patch.reason) > 20


def _model_by_arguments(settings: dict[str, object]) -> tuple[list[bool], bool]:
    """A GPT model by `--spec moe_plugin.hosts.megatron.spec moe_layer` in a script with those
    settings: which layers are ours (multi-token prediction last), and whether all parameters
    outside of MoE layers are those of the model that Megatron builds itself.
    """
    import argparse
    import importlib
    from types import SimpleNamespace

    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.spec_utils import import_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from moe_plugin.hosts.megatron import spec
    from moe_plugin.hosts.megatron.layer import PluginMoELayer

    ps.initialize_model_parallel()
    base = {
        "num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 2,
        "use_cpu_initialization": True, "add_bias_linear": False, "moe_router_topk": 1,
        "moe_router_pre_softmax": True
    }
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    config = kind(**{**base, **settings})
    # what a parsed script leaves behind
    sys.modules["megatron.training.global_vars"] = SimpleNamespace(  # type: ignore[assignment]
        _GLOBAL_ARGS=argparse.Namespace(transformer_impl="local"))
    sys.modules["megatron.training.arguments"] = SimpleNamespace(  # type: ignore[assignment]
        core_transformer_config_from_args=lambda _: config)
    sys.modules.setdefault("megatron.training", SimpleNamespace())  # type: ignore[arg-type]
    importlib.reload(spec)  # the script imports it after its arguments are parsed
    found = import_module(("moe_plugin.hosts.megatron.spec", "moe_layer"))
    native = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False))

    if settings.get("multi_latent_attention"):  # not built without Transformer Engine
        pairs = list(zip(found.layer_specs, native.layer_specs, strict=True))
        return [True] * len(pairs), all(
            a.submodules.self_attention == b.submodules.self_attention for a, b in pairs)

    def build(layers: object) -> GPTModel:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, layers, use_transformer_engine=False) if config.mtp_num_layers else None
        return GPTModel(config, layers, vocab_size=8, max_sequence_length=8, mtp_block_spec=mtp)

    def dense(model: GPTModel) -> dict[str, object]:
        return {name: tuple(p.shape) for name, p in model.named_parameters()
                if ".router." not in name and ".experts." not in name}

    ours = build(found)
    layers = [m for m in ours.modules() if type(m).__name__ == "TransformerLayer"]
    return [isinstance(layer.mlp, PluginMoELayer) for layer in layers], dense(ours) == dense(
        build(native))


def test_spec_follows_the_arguments() -> None:
    """Each of them that this version has."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from tests.hosts.megatron.ranks import on_ranks

    every = [True] * 4
    for settings, layers in (
        ({"qk_layernorm": True}, every), ({"qk_l2_norm": True}, every),
        ({"multi_latent_attention": True, "qk_layernorm": True}, every),
        ({"moe_layer_freq": 2, "normalization": "RMSNorm"}, [True, False, True, False]),
        ({"moe_layer_freq": [0, 1, 1, 0]}, [False, True, True, False]),
        ({"mtp_num_layers": 1}, [*every, True])):
        if settings.keys() <= {field.name for field in fields(MLATransformerConfig)}:
            assert on_ranks(1, _model_by_arguments, settings) == [(layers, True)], settings


def _spec_of_virtual_stages(settings: dict[str, Any]) -> list[list[tuple[int, bool]]]:
    """By virtual stage: number and kind (whether it has our MoE layer) of each layer that a block
    has which is built from what `--spec` gives.
    """
    import argparse
    import importlib
    from types import SimpleNamespace

    from megatron.core import parallel_state as ps
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_plugin.hosts.megatron import spec
    from moe_plugin.hosts.megatron.layer import PluginMoELayer

    ps.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=2, num_moe_experts=2, moe_router_topk=1,
        moe_router_pre_softmax=True, use_cpu_initialization=True, add_bias_linear=False,
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32, overlap_p2p_comm=True, batch_p2p_comm=False, **settings)
    # what a parsed script leaves behind
    sys.modules["megatron.training.global_vars"] = SimpleNamespace(  # type: ignore[assignment]
        _GLOBAL_ARGS=argparse.Namespace(transformer_impl="local"))
    sys.modules["megatron.training.arguments"] = SimpleNamespace(  # type: ignore[assignment]
        core_transformer_config_from_args=lambda _: config)
    sys.modules.setdefault("megatron.training", SimpleNamespace())  # type: ignore[arg-type]
    found = importlib.reload(spec).moe_layer
    assert len(found.layer_specs) == 4
    blocks = [TransformerBlock(config, found, pre_process=False, post_process=False,
                               vp_stage=stage) for stage in range(2)]
    return [[(layer.layer_number, isinstance(layer.mlp, PluginMoELayer)) for layer in block.layers]
            for block in blocks]


def test_spec_follows_virtual_stages() -> None:
    """Layers of every kind, in stages of any length."""
    from tests.hosts.megatron.ranks import on_ranks

    assert on_ranks(2, _spec_of_virtual_stages, {"moe_layer_freq": [0, 1, 1, 0]}) == [
        [[(1, False)], [(3, True)]], [[(2, True)], [(4, False)]]]
    layout = {"moe_layer_freq": [0, 1, 1, 1], "pipeline_model_parallel_layout": "Ett|t||tL"}
    assert on_ranks(2, _spec_of_virtual_stages, layout) == [
        [[(1, False), (2, True)], []], [[(3, True)], [(4, True)]]]


@own_loop
def test_modules_in_a_file_need_trust(tmp_path: Path) -> None:
    from moe_plugin.hosts.megatron.spec import script_spec
    from moe_plugin.hosts.megatron.translate import settings_from_flags

    def settings(*more: str) -> dict[str, object]:
        return settings_from_flags(vars(arguments_of([*MODEL, *more])))

    (tmp_path / "moe.yaml").write_text("imports: json\n")
    config = ["--moe-config", str(tmp_path / "moe.yaml")]
    for read in (lambda: settings(*config), lambda: script_spec(str(tmp_path / "moe.yaml"))):
        # a rank's error is in the words of the assertion
        with pytest.raises((ValueError, AssertionError),
                           match="imports='json'.*--moe-trust-imports"):
            read()
    assert settings(*config, "--moe-trust-imports") == {"imports": "json"}
    assert settings("--moe-import", "json") == {"imports": "json"}


def _refused_sizes() -> tuple[str | None, int]:
    from megatron.core import parallel_state

    from moe_plugin.hosts.megatron import launch as endings
    from moe_plugin.hosts.megatron.compat import core

    core.destroy_groups()
    try:
        parallel_state.initialize_model_parallel(expert_model_parallel_size=4)
    except RuntimeError as error:
        caught = error

    def work() -> None:
        raise caught

    return endings.of_a_script(caught), endings.status_of("script", work, dict)


def test_parallel_sizes_above_the_ranks_end_in_one_line() -> None:
    [(said, status)] = on_ranks(1, _refused_sizes)
    assert said is not None and "\n" not in said and "divisible" in said and status == 2
    assert "--expert-model-parallel-size" in said and "1 ranks" in said


@pytest.mark.parametrize(("decay", "start", "words", "others"), [
    (2, 0.0, "Increase --train-iters", "--override"), (9, -1.0, "must be true", "--train-iters")])
def test_remedies_of_schedules_are_those_of_the_cause(decay: int, start: float, words: str,
                                                      others: str) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from moe_plugin.hosts.megatron.launch import of_a_script

    with pytest.raises(AssertionError) as caught:
        OptimizerParamScheduler(None, start, 1e-3, start, 4, decay, "linear", 0.0, 0.0, 2,
                                "constant")
    said = of_a_script(caught.value)
    assert said is not None and words in said and others not in said


def test_helpers_are_compiled_for_this_python(tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_plugin.hosts.megatron.compat import settings

    found = ["pybind11"]
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: name in found or None)
    if shutil.which("make") is None:
        with pytest.raises(ValueError, match="need make and a C"):
            settings.compile_helpers(tmp_path)
    else:
        with pytest.raises(ValueError, match=r"cannot be compiled for this Python: .*\. Install"):
            settings.compile_helpers(tmp_path)
        (tmp_path / "Makefile").write_text("LIBEXT = .other\nall:\n\ttouch helpers_cpp$(LIBEXT)\n")
        settings.compile_helpers(tmp_path)
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        assert [path.name for path in tmp_path.glob("helpers*")] == [f"helpers_cpp{suffix}"]
    found.clear()
    with pytest.raises(ValueError, match="-m pip install pybind11"):
        settings.compile_helpers(tmp_path)


def _said_of_layers(ours: bool) -> list[str]:
    from moe_plugin.hosts.megatron import script_features
    from tests.hosts.megatron.layers import Case, build, initialise_parallel

    initialise_parallel(Case())
    said = list[str]()
    script_features.logger.warning = said.append  # type: ignore[method-assign]
    script_features.say_native([build(Case(), ours)])
    return said


def test_layers_of_megatrons_own_are_named_once() -> None:
    [[native]] = on_ranks(1, _said_of_layers, False)
    assert "--spec moe_plugin.hosts.megatron.spec moe_layer" in native
    assert on_ranks(1, _said_of_layers, True) == [[]]
