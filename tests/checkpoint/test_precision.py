"""What stays in float32 keeps its bits when the data type of a model changes: selection biases,
routers under `router.fp32`, statistics; in every format, in casts of modules, and in averages.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.checkpoint import load, save
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers all formats
from moe_plugin.checkpoint.formats.base import CheckpointSizes, convert, formats, open_source
from moe_plugin.checkpoint.formats.huggingface.format import state_source, to_neutral
from moe_plugin.checkpoint.name_table import marked
from moe_plugin.checkpoint.neutral import DecoderSettings
from moe_plugin.checkpoint.source import MODEL, Derived, Source, TensorEntry, View
from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.huggingface import restore_moe_blocks, swap_moe_blocks
from moe_plugin.routing import routers
from tests.checkpoint import test_tutel
from tests.checkpoint.hf_models import logits, tiny, tokens
from tests.routing.test_fp32 import settings

LOWER = [torch.bfloat16, torch.float16]
STEP = 0.001  # of `router.bias_rate`: bfloat16 rounds by up to 0.002 next to 1


def biased(module: nn.Module, name: str) -> torch.Tensor:
    """The bias, after some steps: values that 16 bits cannot hold."""
    bias = module.get_buffer(name)
    with torch.no_grad():
        bias.copy_(1 + STEP * torch.arange(len(bias)))
    assert not any(torch.equal(bias.to(dtype).float(), bias) for dtype in LOWER)
    return bias.clone()


def converted(source: Source, path: Path, to: str, dtype: torch.dtype,
              **sizes: int) -> dict[str, torch.Tensor]:
    """The model's tensors of a result of `reshard --dtype`."""
    Conversion(source, path, to, CheckpointSizes(dtype=dtype, **sizes)).run()
    with open_source(path, to) as out:
        return {name: out.read((field, name)) for field, name in out.entries if field == MODEL}


@pytest.mark.parametrize("dtype", LOWER)
def test_the_bias_of_our_router(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its values are those of the float32 model, and so is every choice."""
    config = from_dict({"model_dim": 16, "num_experts": 8, "router": {
        "name": "sigmoid_bias", "top_k": 2}})
    layer = MoELayer(config)
    bias = biased(layer, "router.bias_E")
    save(tmp_path / "in", nn.ModuleDict({"moe": layer}))
    with open_source(tmp_path / "in") as source:
        found = converted(source, tmp_path / "out", "plain", dtype, ep=2)
    assert torch.equal(found["moe.router.bias_E"], bias)
    assert found["moe.router.weight_ED"].dtype == found["moe.experts.w_in_LDF"].dtype == dtype
    again = MoELayer(config, dtype=dtype)
    load(tmp_path / "out", nn.ModuleDict({"moe": again}))
    assert torch.equal(again.router.bias_E, bias)


@pytest.mark.parametrize("name", routers.names())
def test_routers_in_float32(name: str, tmp_path: Path) -> None:
    layers = {}
    for what, fp32 in (("kept", True), ("cast", False)):
        layers[what] = MoELayer(from_dict(settings(name, fp32)))
    save(tmp_path / "in", nn.ModuleDict(layers))
    with open_source(tmp_path / "in") as source:
        found = converted(source, tmp_path / "out", "plain", torch.bfloat16)
        before = {key[1]: source.read(key) for key in source.entries}
    for full, value in found.items():
        kept, what = ("kept.router." in full or full.endswith("bias_E")), before[full]
        dtype = torch.bfloat16 if what.is_floating_point() and not kept else what.dtype
        assert torch.equal(value, what.to(dtype)) and value.dtype == dtype, full
    assert found["kept.experts.w_in_LDF"].dtype == torch.bfloat16


def test_one_of_several_routers_and_state_of_your_own(tmp_path: Path) -> None:
    """Buffers of a router derived from ours stay in float32 in the module; the checkpoint says so.
    """
    layer = MoELayer(from_dict(settings("switch,sigmoid_bias", False)))
    layer.router.routers[0].register_buffer("quantiles_E", torch.full((4,), 1 + STEP))
    save(tmp_path / "in", layer)
    with open_source(tmp_path / "in") as source:
        found = converted(source, tmp_path / "out", "plain", torch.bfloat16)
    assert torch.equal(found["router.routers.0.quantiles_E"], torch.full((4,), 1 + STEP))
    assert found["router.routers.1.bias_E"].dtype == torch.float32
    assert found["router.routers.1.weight_ED"].dtype == torch.bfloat16
    lowered = copy.deepcopy(layer).half()
    for name in (name for name, value in found.items() if value.dtype == torch.float32):
        assert lowered.state_dict()[name].dtype == torch.float32


def test_running_statistics(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.randn(9, 4))
    save(tmp_path / "in", model)
    with open_source(tmp_path / "in") as source:
        found = converted(source, tmp_path / "out", "plain", torch.bfloat16)
    assert torch.equal(found["1.running_var"], model[1].running_var)
    assert found["1.weight"].dtype == found["0.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("to", ["hf", "plain"])
def test_deepseek_v3(to: str, tmp_path: Path) -> None:
    """What `transformers` keeps in float32: the bias and the router."""
    model = tiny("deepseek_v3")
    bias = biased(model, "model.layers.1.mlp.gate.e_score_correction_bias")
    gate = model.model.layers[1].mlp.gate.weight.detach()
    model.save_pretrained(tmp_path / "in")
    with open_source(tmp_path / "in") as source:
        found = converted(source, tmp_path / "out", to, torch.bfloat16)
    names = ("model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.gate.weight") \
        if to == "hf" else ("layers.1.moe.router.expert_bias", "layers.1.moe.router.weight")
    for name, value in zip(names, (bias, gate), strict=True):
        assert torch.equal(found[name], value)
    others = {value.dtype for name, value in found.items()
              if "gate." not in name and "router." not in name}
    assert others == {torch.bfloat16}
    if to == "hf":
        import transformers

        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert again.dtype == torch.bfloat16
        assert torch.equal(again.model.layers[1].mlp.gate.e_score_correction_bias, bias)


def biased_neutral(path: Path) -> Source:
    """A neutral model that Megatron and fairseq can hold, with a bias for the choice."""
    tiny("mixtral", sliding_window=None).save_pretrained(path)
    source = to_neutral(open_source(path))
    model = replace(DecoderSettings.from_dict(source.values["model"]), router="sigmoid",
                    normalize_top_k=True)
    bias_E = 1 + STEP * torch.arange(6.0)
    more = [Derived((MODEL, f"layers.{layer}.moe.router.expert_bias"),
                    TensorEntry((6,), torch.float32, keeps_float32=True), lambda at: bias_E[at])
            for layer in range(3)]
    return View(source, [*map(source.tensor, source.entries), *more], format="neutral",
                values={"model": model.to_dict(), "step": 0})


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("to", ["megatron", "megatron_native"])
def test_megatron(to: str, fp32: bool, tmp_path: Path) -> None:
    """Its settings have ours, as a run with `--moe-router-fp32` writes them."""
    form = formats.get(to)()
    first = convert(biased_neutral(tmp_path / "hf"), to)
    ours = {"moe_plugin": {"router.fp32": True}} if fp32 else {}
    first = View(first, map(first.tensor, first.entries), values={
        **first.values, "settings": {**first.values["settings"], **ours}})
    (tmp_path / "in").mkdir()
    form.write(first, tmp_path / "in", CheckpointSizes())
    with open_source(tmp_path / "in", to) as source:
        router = source.read((MODEL, "decoder.layers.1.mlp.router.weight"))
        found = converted(source, tmp_path / "out", to, torch.bfloat16)
        other = converted(source, tmp_path / "plain", "plain", torch.bfloat16)
    name = "decoder.layers.1.mlp.router."
    assert torch.equal(found[name + "expert_bias"], 1 + STEP * torch.arange(6.0))
    want = router if fp32 else router.bfloat16()
    for values, names in ((found, name), (other, "layers.1.moe.router.")):
        assert torch.equal(values[names + "expert_bias"], found[name + "expert_bias"])
        assert torch.equal(values[names + "weight"], want)
        assert values[names + "weight"].dtype == want.dtype
    assert other["layers.1.moe.experts.w_in_LDF"].dtype == torch.bfloat16


def test_a_layer_of_fairseq(tmp_path: Path) -> None:
    pytest.importorskip("fairseq")
    config = from_dict({"model_dim": 16, "num_experts": 4, "router": {
        "name": "sigmoid_bias", "fp32": True}})
    layer = MoELayer(config)
    bias, prefix = biased(layer, "router.bias_E"), "decoder.layers.0.moe_layer.moe."
    state = {prefix + name: value for name, value in layer.state_dict().items()}
    average = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    torch.save({"cfg": {"model": {"arch": "transformer_lm"}}, "model": state, "optimizer_history": [
        {"num_updates": 3}], "extra_state": {"ema": average}}, tmp_path / "checkpoint_last.pt")
    with open_source(tmp_path, "fairseq") as source:
        found = converted(source, tmp_path / "out", "fairseq", torch.float16)
    assert torch.equal(found[prefix + "router.bias_E"], bias)
    assert torch.equal(found[prefix + "router.weight_ED"], layer.router.weight_ED)
    assert found[prefix + "experts.w_in_LDF"].dtype == torch.float16
    with open_source(tmp_path / "out", "fairseq") as source:  # averages keep their numbers
        assert torch.equal(source.read(("ema", prefix + "router.bias_E")), bias)


@pytest.mark.parametrize("experts", [torch.float16, torch.float32])
def test_gates_of_tutel_that_are_wider_than_their_experts(experts: torch.dtype,
                                                          tmp_path: Path) -> None:
    """As `fp32_gate` leaves them; a checkpoint of float32 alone does not say it."""
    state = {name: value.to(experts) if isinstance(value, torch.Tensor) and "experts." in name
             and value.is_floating_point() else value
             for name, value in test_tutel.whole_state().items()}
    test_tutel.saved(tmp_path / "in", state, 1, "{rank}-of-{size}.pt")
    with open_source(tmp_path / "in", "tutel") as source:
        gates = [name for _, name in source.entries if ".gates." in f".{name}"]
        found = converted(source, tmp_path / "out", "tutel", torch.bfloat16)
        for name in gates:
            kept = torch.float32 if experts == torch.float16 else torch.bfloat16
            assert torch.equal(found[name], source.read((MODEL, name)).to(kept))
            assert found[name].dtype == kept
    assert gates


@pytest.mark.parametrize(("name", "stays"), [
    ("decoder.layers.0.mlp.router.qb_beta", True), ("layers.3.moe.router.expert_bias", True),
    ("model.layers.0.mlp.gate.e_score_correction_bias", True), ("a.router.weight_ED", False),
    ("a.router.bias", False), ("a.bias_in_LF", False), ("bias_E", True)])
def test_names(name: str, stays: bool) -> None:
    entry = TensorEntry((2,), torch.float32)
    weight, moment = marked((Derived((field, name), entry, torch.empty)
                             for field in (MODEL, "exp_avg")), {})
    assert weight.entry.keeps_float32 == stays
    assert not moment.entry.keeps_float32


def test_renamed_cut_and_joined_tensors_stay(tmp_path: Path) -> None:
    tiny("deepseek_v3").save_pretrained(tmp_path)
    with open_source(tmp_path) as source:
        view = convert(convert(source, "plain"), "hf")
        kept = {name for (_, name), entry in source.entries.items() if entry.keeps_float32}
        assert {name for (_, name), entry in view.entries.items() if entry.keeps_float32} == kept
    assert len(kept) == 4  # of two layers


def test_blocks_of_a_16_bit_deepseek_keep_their_numbers() -> None:
    """As `from_pretrained(dtype=bfloat16)` gives it: the router is in float32, too."""
    model = tiny("deepseek_v3")
    gate = model.model.layers[1].mlp.gate
    weight, kept = gate.weight.detach().clone(), {}
    model.bfloat16().set_experts_implementation("eager")  # of narrow experts
    for layer in model.model.layers[1:]:
        layer.mlp.gate.float()
        kept[layer] = biased(layer.mlp.gate, "e_score_correction_bias")
    gate.weight.data = weight
    want = logits(model, tokens(model))
    swap_moe_blocks(model)
    moe = model.model.layers[1].mlp.moe
    assert torch.equal(moe.router.weight_ED, weight) and moe.experts.dtype == torch.bfloat16
    got = logits(model, tokens(model))
    assert float((got - want).abs().max()) <= 0.05 * float(want.abs().max())
    for layer in model.model.layers[1:]:  # one step
        layer.mlp.moe.router.bias_E += STEP
    restore_moe_blocks(model)
    for layer, bias in kept.items():
        assert torch.equal(layer.mlp.gate.e_score_correction_bias, bias + STEP)
    assert torch.equal(model.model.layers[1].mlp.gate.weight, weight)
    assert model.model.layers[1].mlp.experts.down_proj.dtype == torch.bfloat16
    assert logits(model, tokens(model)).isfinite().all()


def test_a_model_that_was_all_16_bit_gets_a_float32_bias() -> None:
    model = tiny("deepseek_v3").bfloat16()
    swap_moe_blocks(model)
    bias = biased(model, "model.layers.1.mlp.moe.router.bias_E")
    restore_moe_blocks(model)
    assert torch.equal(model.model.layers[1].mlp.gate.e_score_correction_bias, bias)
    assert model.model.layers[1].mlp.gate.weight.dtype == torch.bfloat16


def test_averages_of_a_16_bit_model() -> None:
    layer = MoELayer(16, num_experts=4, router={"name": "sigmoid_bias", "fp32": True}).bfloat16()
    bias = biased(layer, "router.bias_E")
    state = torch.optim.swa_utils.AveragedModel(layer).state_dict()
    assert torch.equal(state["module.router.bias_E"], bias)
    assert state["module.router.weight_ED"].dtype == torch.float32
    assert state["module.experts.w_in_LDF"].dtype == torch.bfloat16


def test_a_state_dict_says_what_stays() -> None:
    entries = state_source({"mlp.gate.weight": torch.zeros(2, 2),
                           "mlp.gate.e_score_correction_bias": torch.ones(2)}, {}).entries
    assert [entry.keeps_float32 for entry in entries.values()] == [False, True]
