"""Adapters as servers load them, by readers that follow the code of vLLM and SGLang, and adapters
that are merged into quantized folders.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.20")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402

from moe_plugin.checkpoint.formats.huggingface.files import open_safetensors  # noqa: E402
from moe_plugin.checkpoint.formats.huggingface.quantization import dequantized  # noqa: E402
from moe_plugin.hosts.plain.adapters import (  # noqa: E402
    add_lora,
    merge_adapter,
    save_adapter,
)
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks  # noqa: E402
from tests.checkpoint.hf_models import tiny, tokens  # noqa: E402
from tests.checkpoint.quantized import (  # noqa: E402
    config_of,
    folder,
    product,
    quantized,
    read_all,
    write,
)
from tests.hosts.plain.test_lora_files import close, shaken, swapped  # noqa: E402


def adapter(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return (json.loads((path / "adapter_config.json").read_text()),
            load_file(path / "adapter_model.safetensors"))


def vllm(path: Path) -> dict[str, Tensor]:
    """What vLLM adds to each weight: `PEFTHelper`, `parse_fine_tuned_lora_name`, `optimize`, and
    `pack_moe`, which stacks the factors of all experts and so needs one shape.
    """
    config, tensors = adapter(path)
    assert config["target_parameters"] is None
    scale = config["lora_alpha"] / config["r"]
    added, shapes = {}, {}
    for name, a in tensors.items():
        parts = name.split(".")
        assert parts[:2] == ["base_model", "model"] and parts[-1] == "weight"
        assert parts[-2] in ("lora_A", "lora_B") and parts[-3] in config["target_modules"]
        if parts[-2] == "lora_A":
            b = tensors[name.replace("lora_A", "lora_B")]
            assert a.shape[0] == b.shape[1] <= config["r"]
            module = ".".join(parts[2:-2])
            added[module] = scale * b.double() @ a.double()
            if ".experts." in name:
                shapes.setdefault(re.sub(r"\.\d+\.", ".", module), set()).add((a.shape, b.shape))
    assert all(len(each) == 1 for each in shapes.values())
    return added


def sglang(path: Path) -> dict[str, Tensor]:
    """What SGLang adds to each weight: `normalize_gate_up_proj` repeats lora_A of the stacks, whose
    halves then belong to the halves of lora_B; the scale is alpha / r, also with rsLoRA.
    """
    config, tensors = adapter(path)
    scale = config["lora_alpha"] / config["r"]
    added = {}
    for name, a in tensors.items():
        if "lora_A" not in name:
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert a.shape[-2] == config["r"]  # the buffers of all modules have one rank
        if ".experts." not in module:
            added[module] = scale * b.double() @ a.double()
            continue
        place, leaf = module.rsplit(".", 1)
        for expert in range(a.shape[0]):
            one, other = a[expert].double(), b[expert].double()
            if leaf == "down_proj":
                added[f"{place}.{expert}.down_proj"] = scale * other @ one
                continue
            both, half = one.repeat(2, 1), len(other) // 2
            for at, name_of in enumerate(("gate_proj", "up_proj")):
                added[f"{place}.{expert}.{name_of}"] = scale * (
                    other[at * half:(at + 1) * half] @ both[at * config["r"]:
                                                            (at + 1) * config["r"]])
    return added


MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.mark.parametrize("format", ["vllm", "sglang"])
@pytest.mark.parametrize("kind,attention", [("mixtral", False), ("qwen3_moe", True)])
def test_servers_get_the_logits_of_the_trained_model(kind: str, attention: bool, format: str,
                                                     tmp_path: Path) -> None:
    """One expert has a smaller rank, one layer no adapter on gates, and ranks have roots."""
    model = swapped(kind)
    if attention:
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=2, lora_alpha=3, use_rslora=True, target_modules=["o_proj"]))
    add_lora(model, 4, 8.0, freeze=not attention, use_rslora=attention,
             rank_pattern={r".*\.1\.down": 2, r".*layers\.2.*gate_up": 0})
    ids, want = tokens(tiny(kind)), shaken(model)(tokens(tiny(kind))).logits
    save_adapter(model, tmp_path, format=format)
    tiny(kind).save_pretrained(tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    for module, value in (vllm if format == "vllm" else sglang)(tmp_path).items():
        if kind == "mixtral" and format == "sglang" and ".experts." in module:
            place, leaf = module.rsplit(".", 1)
            module = f"{place}.{MIXTRAL[leaf]}"
        state[f"{module}.weight"] += value.float()
    write(tmp_path / "merged", state, config_of(tmp_path / "model"))
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (tiny(kind)(ids).logits - want).abs().max() > 0.1
    close(served(ids).logits, want)
    # merging the file that vLLM reads gives the same model
    if format == "vllm":
        merge_adapter(tmp_path / "model", tmp_path, tmp_path / "ours")
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        close(ours(ids).logits, want)


def test_what_servers_cannot_read_is_refused(tmp_path: Path) -> None:
    model = swapped("gpt_oss")
    add_lora(model, 2)
    for format in ("vllm", "sglang"):
        with pytest.raises(ValueError, match=f"'{format}' is not known .* Use format='peft'"):
            save_adapter(model, tmp_path, format=format)
    with pytest.raises(ValueError, match="format='tgi' must be peft, vllm, sglang"):
        save_adapter(model, tmp_path, format="tgi")
    model = peft.get_peft_model(swapped(), peft.LoraConfig(
        r=2, rank_pattern={"o_proj": 1}, target_modules=["o_proj"]))
    add_lora(model, 2, freeze=False)
    with pytest.raises(ValueError, match="rank_pattern or alpha_pattern. Leave it out"):
        save_adapter(model, tmp_path, format="vllm")


def trained(plain: Path, out: Path, format: str) -> None:
    """Save an adapter that changes some experts of a model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    swap_moe_blocks(model)
    add_lora(model, 2, 4.0, experts=[1, 3])
    save_adapter(shaken(model), out, format=format)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_an_adapter_is_merged_into_float8_blocks(kind: str, tmp_path: Path) -> None:
    """Weights with adapters are quantized as by hand, all other bits stay."""
    folder(tmp_path / "fp8", kind)
    trained(tmp_path / "fp8" / "plain", tmp_path / "adapter", "vllm")
    names = merge_adapter(tmp_path / "fp8", tmp_path / "adapter", tmp_path / "out")
    assert config_of(tmp_path / "out") == config_of(tmp_path / "fp8")
    before, after = (read_all(open_safetensors(tmp_path / where)) for where in ("fp8", "out"))
    assert list(before) == list(after)
    added = vllm(tmp_path / "adapter")
    moved = {f"{module}.weight" for module, value in added.items() if value.any()}
    assert moved < set(names) == {f"{module}.weight" for module in added}
    for name in set(before) - moved - {name + "_scale_inv" for name in moved}:
        assert torch.equal(*(each[name].contiguous().view(torch.uint8) for each in (before, after)))
    for name in moved:
        scales = f"{name}_scale_inv"
        whole = product(before[name], before[scales]).float() + added[name[:-7]].float()
        codes, scale = quantized(whole)
        assert after[scales].dtype == before[scales].dtype
        torch.testing.assert_close(after[scales], scale, rtol=1e-6, atol=0)
        same = after[name].float() == codes.float()  # a sum may round differently
        assert same.float().mean() > 0.999
        error = (product(after[name], after[scales]) - whole.double()).abs()
        assert (error <= whole.double().abs() / 16 + whole.abs().max() / 448 / 512).all()


def mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 of [E, O, I], number by number: the smallest power of two with 6 times it in reach."""
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    blocks = values.double().unflatten(-1, (-1, 32))
    powers = torch.full(blocks.shape[:-1], -126)
    while (blocks.abs().amax(-1) > 6 * powers.double().exp2()).any():
        powers += (blocks.abs().amax(-1) > 6 * powers.double().exp2()).long()
    scaled = blocks / powers.double().exp2()[..., None]
    distance = (scaled.abs()[..., None] - steps).abs()
    even = distance + torch.tensor([0, 1e-12] * 4)  # ties go to even codes
    codes = even.argmin(-1) + 8 * torch.signbit(scaled).long()
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), (powers + 127).to(torch.uint8)


def test_an_adapter_is_merged_into_mxfp4(tmp_path: Path) -> None:
    tiny("gpt_oss", hidden_size=32, intermediate_size=32).save_pretrained(tmp_path / "plain")
    with open_safetensors(tmp_path / "plain") as source:
        state, config = read_all(source), source.values["config"]
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        codes, scales = mxfp4(state.pop(name).mT)
        state[f"{name}_blocks"], state[f"{name}_scales"] = codes, scales
    write(tmp_path / "in", state, {**config, "quantization_config": {"quant_method": "mxfp4"}})
    with dequantized(open_safetensors(tmp_path / "in")).decoded(torch.float32) as source:
        plain = read_all(source)
    write(tmp_path / "wide", plain, config)
    trained(tmp_path / "wide", tmp_path / "adapter", "peft")
    names = merge_adapter(tmp_path / "in", tmp_path / "adapter", tmp_path / "out")
    assert len(names) == 2 * config["num_hidden_layers"]
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide"), tmp_path / "adapter")
    ids = tokens(loaded)
    want = loaded(ids).logits
    whole = dict(loaded.merge_and_unload().state_dict())
    after = read_all(open_safetensors(tmp_path / "out"))
    for name, value in state.items():
        base = name.removesuffix("_blocks").removesuffix("_scales")
        if base not in names:
            assert torch.equal(after[name], value), name
            continue
        made = mxfp4(whole[base].mT)[name.endswith("_scales")]
        untouched = [expert for expert in range(len(value)) if expert not in (1, 3)]
        assert torch.equal(after[name][untouched], value[untouched])
        same = (after[name] == made)[[1, 3]].float().mean()
        assert same > 0.999, (name, same)  # a sum may round differently
    with dequantized(open_safetensors(tmp_path / "out")).decoded(torch.float32) as source:
        write(tmp_path / "served", read_all(source), config)
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    far = (transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide"))(ids).logits
    assert (served(ids).logits - want).norm() < 0.5 * (far - want).norm()


def test_adapters_that_cannot_be_merged(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path / "model")
    trained(tmp_path / "model", tmp_path / "stacks", "peft")
    with pytest.raises(ValueError, match="no '.*_blocks' .MXFP4.*format='vllm'"):
        merge_adapter(tmp_path / "model", tmp_path / "stacks", tmp_path / "out")
    trained(tmp_path / "model", tmp_path / "served", "sglang")
    with pytest.raises(ValueError, match=r"must be \[r, in\] and \[out, r\].*format='vllm'"):
        merge_adapter(tmp_path / "model", tmp_path / "served", tmp_path / "out")
    trained(tmp_path / "model", tmp_path / "mine", "vllm")
    tiny("mixtral", intermediate_size=48).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"weight of the shape \(40, 32\), but .* has \(48, 32\)"):
        merge_adapter(tmp_path / "other", tmp_path / "mine", tmp_path / "out")
    tiny("mixtral", num_hidden_layers=1).save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match="has no tensor 'model.layers.*the adapter changes"):
        merge_adapter(tmp_path / "short", tmp_path / "mine", tmp_path / "out")
    with pytest.raises(ValueError, match="is the folder of the model"):
        merge_adapter(tmp_path / "model", tmp_path / "mine", tmp_path / "model")
    assert not (tmp_path / "out").exists()
