"""Quantized Hugging Face folders: float8 weights are code times scale, by hand in float64; others
are refused by name at every door.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats.base import CheckpointSizes, convert, open_source
from moe_plugin.checkpoint.formats.huggingface.format import state_source, to_neutral
from moe_plugin.checkpoint.formats.huggingface.quantization import _is_pair, dequantized
from moe_plugin.checkpoint.formats.huggingface.requantize import _float8
from moe_plugin.checkpoint.layers import write_experts
from moe_plugin.checkpoint.source import MODEL, Derived, View, Window, window_shape
from moe_plugin.cli.main import main
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from tests.checkpoint.hf_models import logits, tiny, tokens
from tests.checkpoint.quantized import (
    BLOCK,
    CODES,
    config_of,
    folder,
    product,
    quantized,
    read_all,
    write,
)

transformers = pytest.importorskip("transformers", minversion="5.20")
WEIGHT = "model.layers.0.mlp.experts.0.gate_proj.weight"


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "llama"])
def test_weights_are_code_times_scale(kind: str, tmp_path: Path) -> None:
    wanted = folder(tmp_path, kind)
    with open_source(tmp_path) as source:
        assert "quantization_config" not in source.values["config"]
        assert source.describe()["quantization"] == "fp8, blocks of 16 x 12, read as bfloat16"
        found = read_all(source)
        window = (slice(5, 23), slice(7, 26))
        for name, value in wanted.items():
            assert found[name].dtype == (torch.float32 if "correction" in name else torch.bfloat16)
            assert torch.equal(found[name], value.float().to(found[name].dtype)), name
            if value.dim() == 2 and min(value.shape) > 25:
                part = source.read((MODEL, name), window)
                assert torch.equal(part, found[name][window])
    assert sorted(found) == sorted(wanted)
    assert max(float(value.abs().max()) for value in found.values()) < 10  # codes reach 448


def test_blocks_of_128_whose_last_are_cut() -> None:
    torch.manual_seed(0)
    codes, scales = quantized(torch.randn(200, 300), (128, 128))
    assert scales.shape == (2, 3)
    source = dequantized(state_source({WEIGHT: codes, WEIGHT + "_scale_inv": scales}, {
        "torch_dtype": "float32", "quantization_config": {"quant_method": "fp8"}}))
    want = product(codes, scales, (128, 128))
    torch.testing.assert_close(source.read((MODEL, WEIGHT)).double(), want, rtol=1e-7, atol=0)
    assert torch.equal(source.decoded(torch.float64).read((MODEL, WEIGHT)), want)
    assert source.read((MODEL, WEIGHT), (slice(130, 130), slice(0, 7))).shape == (0, 7)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("to", ["hf", "plain", "megatron", "megatron_native"])
def test_every_format_gets_the_numbers(to: str, dtype: str | None, tmp_path: Path) -> None:
    """As from a folder in which the same numbers are plain."""
    wanted = folder(tmp_path / "fp8", "qwen3_moe")
    given = getattr(torch, dtype or "bfloat16")
    config = {key: value for key, value in config_of(tmp_path / "fp8").items()
              if key != "quantization_config"}
    write(tmp_path / "by_hand", {name: value.float().to(given) for name, value in wanted.items()},
          config)
    argument = [] if dtype is None else ["--dtype", dtype]
    assert main(["reshard", str(tmp_path / "fp8"), str(tmp_path / "out"), "--to", to,
                 *argument]) == 0
    with open_source(tmp_path / "out") as out, open_source(tmp_path / "by_hand") as by_hand:
        found, want = read_all(out), read_all(convert(by_hand, to))
        assert sorted(found) == sorted(want)
        for name, value in want.items():
            assert found[name].dtype == given and torch.equal(found[name], value), name
    if to == "hf":
        assert "quantization_config" not in config_of(tmp_path / "out")


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_transformers_reads_the_same(kind: str, tmp_path: Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")  # transformers asks for it
    # transformers wants whole blocks
    folder(tmp_path / "fp8", kind, lambda value: quantized(value, (4, 2)), "weight_scale_inv",
           weight_block_size=[4, 2])
    assert main(["reshard", str(tmp_path / "fp8"), str(tmp_path / "out"), "--dtype",
                 "float32"]) == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path / "fp8", dtype=torch.float32,
                  quantization_config=transformers.FineGrainedFP8Config(dequantize=True))
    ours = load(tmp_path / "out")
    assert ours.dtype == torch.float32
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert torch.equal(logits(ours, tokens(ours)), logits(theirs, tokens(theirs)))
    assert main(["check-hf", str(tmp_path / "fp8"), "--tokens", "9"]) == 0
    assert "MoE blocks, 9 tokens" in capsys.readouterr().out
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    assert main(["check-hf", str(tmp_path / "fp8"), "--tokens", "9"]) == 2
    assert "no quantization_config that describes" in capsys.readouterr().err


def test_inspect_upcycle_and_experts_alone(tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    wanted = folder(tmp_path / "moe")
    assert main(["inspect", str(tmp_path / "moe"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["layout"]["quantization"].startswith("fp8, blocks of 16 x 12")
    assert not any("scale" in name for name in said["tensors"])
    assert set(said["fields"]["model"]["dtypes"]) == {"bfloat16"}
    with open_source(tmp_path / "moe") as source:
        write_experts(source, tmp_path / "experts.safetensors")
    from safetensors.torch import load_file
    [first] = [value for name, value in load_file(tmp_path / "experts.safetensors").items()
               if name.startswith("layers.0.") and name.endswith("w_out_LFD")]
    name = next(name for name in wanted if "layers.0" in name and "experts.0." in name
                and name.endswith(("w2.weight", "down_proj.weight")))
    assert torch.equal(first[0], wanted[name].float().bfloat16().t())
    dense = folder(tmp_path / "dense", "llama")
    assert main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "up"), "--experts", "4",
                 "--top-k", "2"]) == 0
    with open_source(tmp_path / "up") as source:
        expert = to_neutral(source).read((MODEL, "layers.1.moe.experts.w_in_LDF"))[3]
    assert torch.equal(expert, dense["model.layers.1.mlp.up_proj.weight"].float().bfloat16().t())


def _one(codes: torch.Tensor, scales: torch.Tensor, name: str = WEIGHT, scale: str = "_scale_inv",
         more: dict[str, torch.Tensor] | None = None, **quantization: Any) -> torch.Tensor:
    """What is read of one weight, in float64."""
    config = {"quantization_config": {"quant_method": "fp8", **quantization}}
    state = {name: codes, (name + scale if scale.startswith("_") else
                           name.removesuffix("weight") + scale): scales, **(more or {})}
    source = dequantized(state_source(state, config))
    assert list(source.entries) == [(MODEL, name)]
    return source.decoded(torch.float64).read((MODEL, name))


def test_forms_of_scales() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 24)
    codes, scales = quantized(weight)
    one, rows = torch.tensor(0.25), torch.rand(32, 1) + 0.1
    for single in (one, one[None], one[None, None]):
        assert torch.equal(_one(codes, single, weight_block_size=None), codes.double() * 0.25)
    assert torch.equal(_one(codes, rows, weight_block_size=None), codes.double() * rows.double())
    block = list(BLOCK)
    for name in ("scale", "qscale_weight", "weight_scale_inv"):
        assert torch.equal(_one(codes, scales, scale=name, weight_block_size=block),
                           product(codes, scales))
    assert torch.equal(_one(codes, scales, weight_block_size=block, more={
        WEIGHT.removesuffix("weight") + "activation_scale": one}), product(codes, scales))
    powers = torch.randint(120, 134, scales.shape, dtype=torch.uint8)
    want = product(codes, (powers.double() - 127).exp2())
    assert torch.equal(_one(codes, powers, quant_method="mxfp8"), want)
    if hasattr(torch, "float8_e8m0fnu"):
        assert torch.equal(_one(codes, powers.view(torch.float8_e8m0fnu),
                                weight_block_size=block), want)
    other = codes.float().to(torch.float8_e5m2)
    assert torch.equal(_one(other, scales, weight_block_size=block), product(other, scales))


def test_experts_in_one_tensor() -> None:
    torch.manual_seed(0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes, scales = quantized(torch.randn(3, 32, 30))
    assert torch.equal(_one(codes, scales, name, weight_block_size=list(BLOCK)),
                       product(codes, scales))
    halves = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]])  # of gate and input
    assert torch.equal(_one(codes, halves, name, weight_block_size=None),
                       codes.double() * halves.double().repeat_interleave(16, 1))


class Recorded(View):
    """Counts the numbers of each read."""

    def __init__(self, *args: Any) -> None:
        origin, self.most = state_source(*args), 0
        super().__init__(origin, map(self._counted, map(origin.tensor, origin.entries)))

    def _counted(self, one: Derived) -> Derived:
        def read(window: Window) -> torch.Tensor:
            self.most = max(self.most, torch.Size(window_shape(window)).numel())
            return one.read(window)

        return replace(one, read=read)


def test_a_window_reads_its_codes_and_scales_alone() -> None:
    codes, scales = quantized(torch.randn(64, 60))
    state = Recorded({WEIGHT: codes, WEIGHT + "_scale_inv": scales}, {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}})
    source = dequantized(state)
    assert state.most == 0
    source.read((MODEL, WEIGHT), (slice(15, 18), slice(11, 13)))
    assert state.most == 6  # of 3840; two blocks down and across


@pytest.mark.parametrize(("method", "tool"), [
    ("gptq", "GPTQModel"), ("awq", "compressed_tensors"),
    ("compressed-tensors", "CompressedTensorsConfig"), ("nvfp4", "compressed_tensors"),
    ("bitsandbytes", r"model\.dequantize\(\)"), ("modelopt", "compressed_tensors"),
    ("torchao", "torchao"), ("quanto", "optimum-quanto"), ("hqq", "the tool that quantized it")])
def test_other_methods_are_named_at_every_door(method: str, tool: str, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path / "in", quant_method=method)
    message = rf"quant_method='{method}' is not supported: .*{tool}"
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path / "in")
    for command in (["inspect"], ["check-hf"], ["reshard", "OUT"], ["reshard", "OUT", "--to",
                    "plain", "--dtype", "bfloat16"], ["upcycle", "OUT", "--experts", "4",
                                                      "--top-k", "2"]):
        words = [str(tmp_path / "out") if word == "OUT" else word for word in command[1:]]
        assert main([command[0], str(tmp_path / "in"), *words]) == 2
        assert method in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    model = tiny("mixtral")
    model.config.quantization_config = {"quant_method": method}
    with pytest.raises(ValueError, match=message):
        swap_moe_blocks(model)


def test_a_model_with_float8_blocks_is_not_swapped() -> None:
    model = tiny("mixtral")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"float8 weights.*=FineGrainedFP8Config\(dequantize"):
        swap_moe_blocks(model)


@pytest.mark.parametrize(("quantization", "message"), [
    ({"expert_dtype": "fp4"}, "expert_dtype='fp4'"), ({"load_in_4bit": True}, "'bitsandbytes'"),
    ({"weight_block_size": [8, 8]}, r"in blocks of \[8, 8\] \(weight_block_size"),
    ({"weight_block_size": None}, "blocks of None"),
    ({"weight_block_size": "no"}, r"weight_block_size='no' must be \["),
    ({"quant_method": None}, "quant_method='None'")])
def test_settings_that_do_not_fit_are_named(quantization: dict[str, Any], message: str,
                                            tmp_path: Path) -> None:
    folder(tmp_path, **quantization)
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path)


def test_codes_without_a_description_are_no_numbers(tmp_path: Path) -> None:
    folder(tmp_path / "in")
    config = config_of(tmp_path / "in")
    del config["quantization_config"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is torch.float8_e4m3fn: .* quantization codes, "
                       ".* no quantization_conf"):
        open_source(tmp_path / "in")
    (tmp_path / "in" / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="quant_method='modelopt'"):
        open_source(tmp_path / "in")
    folder(tmp_path / "other", scale="weight_scale")  # of vLLM's compressors
    with pytest.raises(CheckpointError, match="float8 weights with scales under the names"):
        open_source(tmp_path / "other")
    folder(tmp_path / "packed", quantize=lambda value: (value.to(torch.int8), torch.tensor(1.0)))
    with pytest.raises(CheckpointError, match="weight_scale_inv"):
        open_source(tmp_path / "packed")


def test_a_trained_model_whose_configuration_still_says_it(tmp_path: Path) -> None:
    """`extra` of a training checkpoint may have the configuration of the folder it came from."""
    from moe_plugin.checkpoint import save

    model = tiny("mixtral")
    for method in ("fp8", "gptq"):
        config = {**model.config.to_dict(), "quantization_config": {"quant_method": method}}
        save(tmp_path / method, model, extra={"hf_config": config})
    with open_source(tmp_path / "fp8") as source:
        view = convert(source, "hf")
        assert "quantization_config" not in view.values["config"]
        assert torch.equal(view.read((MODEL, "lm_head.weight")), model.lm_head.weight)
    with open_source(tmp_path / "gptq") as source, pytest.raises(
            CheckpointError, match="quant_method='gptq'"):
        convert(source, "hf")


def test_codes_of_another_format_are_not_cast(tmp_path: Path) -> None:
    from moe_plugin.checkpoint import save

    module = torch.nn.Module()
    module.register_buffer("codes", torch.ones(3, 3).to(CODES))
    save(tmp_path / "in", module)
    with open_source(tmp_path / "in") as source, pytest.raises(
            CheckpointError, match="'codes' is torch.float8_e4m3fn: .* quantization codes, "
            ".* leave --dtype out"):
        Conversion(source, tmp_path / "out", "plain", CheckpointSizes(dtype=torch.bfloat16)).run()


@pytest.mark.fast
@pytest.mark.parametrize("block", [(2, 3), (4, 5), (1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_each_block_has_its_own_scale(block: tuple[int, int], dtype: torch.dtype) -> None:
    """Also the smaller blocks at the edges."""
    values = torch.randn(2, 5, 7).mul(torch.logspace(-3, 3, 5)[:, None])
    codes, scales = _float8(values, block, dtype)
    for row, column in itertools.product(range(5), range(7)):
        top, left = row // block[0] * block[0], column // block[1] * block[1]
        largest = values[:, top:top + block[0], left:left + block[1]].abs().amax((1, 2))
        scale = scales[:, row // block[0], column // block[1]]
        wide = torch.exp2(scale.float() - 127) if dtype == torch.uint8 else scale
        near = largest / 448
        assert ((wide >= 0.99 * near) & (wide <= 2.01 * near)).all()
        code = codes[:, row, column].float()
        assert ((code * wide - values[:, row, column]).abs() <= largest / 14).all()


@pytest.mark.fast
@pytest.mark.parametrize("block, pair", [
    ([2, 3], True), ((1, 1), True), ([2], False), ([2, 0], False), ("ab", False),
    ({1: 2, 3: 4}, False), (None, False), ([2, 3, 4], False), ((2, True), False)])
def test_blocks_are_two_positive_integers(block: Any, pair: bool) -> None:
    assert _is_pair(block) is pair
