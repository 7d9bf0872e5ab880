"""Quantized folders whose experts stay quantized: the bytes of the files, the logits of the decoded
model, trained and saved.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers", minversion="5.20")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

from moe_plugin.checkpoint.formats.huggingface.files import open_safetensors  # noqa: E402
from moe_plugin.comm import TorchComm  # noqa: E402
from moe_plugin.hosts.plain import quantized_folder as module  # noqa: E402
from moe_plugin.hosts.plain.adapters import add_lora, merge_lora, save_adapter  # noqa: E402
from moe_plugin.hosts.plain.huggingface import restore_moe_blocks, swapped_blocks  # noqa: E402
from moe_plugin.hosts.plain.quantized_folder import load_quantized  # noqa: E402
from tests.checkpoint.hf_models import logits, tiny, tokens  # noqa: E402
from tests.checkpoint.quantized import folder, quantized, read_all, write  # noqa: E402
from tests.distributed import run_gloo  # noqa: E402

BLOCK = (128, 128)


def gpt_oss(path: Path) -> Any:
    """Write a folder of gpt-oss; returns the model that `transformers` unpacks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = tiny("gpt_oss", intermediate_size=64, hidden_size=64)
    for value in model.parameters():  # `to` would round buffers as well
        value.data = value.data.bfloat16().float()
    model.save_pretrained(path / "plain")
    with open_safetensors(path / "plain") as source:
        state, config = read_all(source), source.values["config"]
    state = {name: value.bfloat16() for name, value in state.items()}
    g = torch.Generator().manual_seed(1)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8,
                               generator=g)
        scales = torch.randint(120, 126, (experts, outer, inner // 32), dtype=torch.uint8,
                               generator=g)
        state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
        model.get_parameter(name).data = convert_moe_packed_tensors(
            blocks, scales).float()
    write(path / "in", state, {**config, "dtype": "bfloat16", "quantization_config": {
        "quant_method": "mxfp4"}})
    return model


def deepseek(path: Path, kind: str = "deepseek_v3") -> Any:
    """Write a folder of fp8 blocks; returns the model with the values of the codes."""
    wanted = folder(path, kind, lambda w: quantized(w, BLOCK), block=BLOCK,
                    weight_block_size=list(BLOCK))
    (path / "dense").mkdir()
    with open_safetensors(path / "plain") as source:
        config = source.values["config"]
    # other weights are dequantized to the model's dtype
    write(path / "dense", {name: value.float() if ".experts." in name else
                           value.bfloat16().float() for name, value in wanted.items()}, config)
    path.joinpath("in").symlink_to(path)
    return transformers.AutoModelForCausalLM.from_pretrained(path / "dense")


FOLDERS = {"mxfp4": gpt_oss, "fp8": deepseek, "fp8, other names": lambda path: deepseek(
    path, "mixtral")}


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class LargestCodes(TorchDispatchMode):
    """The most bytes of a tensor of codes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            # any tensor is read through a vector of bytes
            if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() > 1 and (
                    not value.is_meta):
                self.most = max(self.most, value.numel())
        return made


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("name", FOLDERS)
def test_codes_are_read_into_a_store(name: str, store: str, tmp_path: Path) -> None:
    wanted = FOLDERS[name](tmp_path).eval()
    path = {"experts.store_path": str(tmp_path / "experts")} if store == "disk" else {}
    with LargestCodes() as seen:
        model = load_quantized(tmp_path / "in", settings={"experts.store": store, **path})
    [experts, *_] = [block.moe.experts for _, block in swapped_blocks(model)]
    one = max(math.prod(shape) for shape in experts.shapes.values())
    # files of gpt-oss have gate and input weights in one tensor
    assert store == "host" or seen.most <= 2 * one < experts.placement.local * one
    ids = tokens(model)
    close(logits(model.float(), ids), logits(wanted, ids))
    add_lora(model, rank=2)
    model(ids, labels=ids).loss.backward()
    trained = [p for name, p in model.named_parameters() if "lora_b" in name]
    assert trained and all(p.grad is not None and p.grad.any() for p in trained)


@pytest.mark.parametrize("name", FOLDERS)
def test_experts_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    wanted = FOLDERS[name](tmp_path).eval()
    model = load_quantized(tmp_path / "in")
    assert not model.training
    ids = tokens(model)
    assert {p.dtype for p in model.parameters()} >= {torch.uint8, torch.bfloat16}
    close(logits(model.float(), ids), logits(wanted, ids))
    codes = [p for n, p in model.named_parameters() if "codes" in n]
    assert codes and all(p.dtype == torch.uint8 for p in codes)  # also after `float()`


def test_codes_are_the_bytes_of_gpt_oss(tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    with open_safetensors(tmp_path / "in") as source:
        state = read_all(source)
    for name, block in swapped_blocks(load_quantized(tmp_path / "in")):
        experts = block.moe.experts
        gate_up, down = (state[f"{name}.experts.{part}_proj_blocks"]
                         for part in ("gate_up", "down"))
        assert torch.equal(experts.codes_gate_LFB, gate_up[:, ::2].flatten(2))
        assert torch.equal(experts.codes_in_LFB, gate_up[:, 1::2].flatten(2))
        assert torch.equal(experts.codes_out_LDB, down.flatten(2))
        assert torch.equal(experts.scales_out_LDB, state[f"{name}.experts.down_proj_scales"])


def ranks_logits(path: str, kind: str) -> tuple[Tensor, Tensor]:
    model = load_quantized(path, TorchComm()).float()
    torch.manual_seed(3)
    add_lora(model, rank=2)
    ids = tokens(model)
    before = logits(model, ids)
    loss = model(ids, labels=ids).loss
    loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
    save_adapter(model, Path(path) / f"adapter{TorchComm().size}")
    return before, logits(model, ids)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_two_ranks_train_adapters_that_peft_loads(name: str, tmp_path: Path) -> None:
    wanted = FOLDERS[name](tmp_path).eval()
    ids = tokens(wanted)
    plain = logits(wanted, ids)
    for before, after in run_gloo(2, ranks_logits, str(tmp_path / "in"), name):
        close(before, plain)
        loaded = peft.PeftModel.from_pretrained(wanted, tmp_path / "in" / "adapter2")
        trained = logits(loaded.eval(), ids)
        assert (trained - plain).abs().max() > 1e-3
        close(after, trained)
        wanted = loaded.unload()


def test_no_weight_of_an_expert_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepseek(tmp_path)
    read = []
    plain = module.Dequantized.read

    def noted(self: Any, key: Any, window: Any = None) -> Tensor:
        read.append(key[1])
        return plain(self, key, window)

    monkeypatch.setattr(module.Dequantized, "read", noted)
    load_quantized(tmp_path / "in")
    assert read and not [name for name in read if ".experts." in name and "shared" not in name]


def test_what_cannot_be_loaded_or_saved_is_named(tmp_path: Path) -> None:
    folder(tmp_path / "small", "mixtral")  # blocks of 16 x 12
    with pytest.raises(ValueError, match=r"weight_block_size=\[16, 12\].*128 x 128.*freeze_exp"):
        load_quantized(tmp_path / "small")
    with pytest.raises(ValueError, match="is not quantized.*from_pretrained"):
        load_quantized(tmp_path / "small" / "plain")
    gpt_oss(tmp_path / "oss")
    model = load_quantized(tmp_path / "oss" / "in")
    for call in (restore_moe_blocks, lambda model: model.save_pretrained(tmp_path / "out")):
        with pytest.raises(ValueError, match="is frozen in the format mxfp4.*save_adapter"):
            call(model)
    add_lora(model)
    for settings in ({}, {"keep": True, "requantize": True}):
        with pytest.raises(ValueError, match=r"frozen in the format mxfp4.*requantize=True"):
            merge_lora(model, **settings)
