"""`freeze_experts` in plain PyTorch: saved and loaded on other ranks, merged, and refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from moe_plugin import MoEBlock, MoELayer, ddp_model, fully_shard_model
from moe_plugin.checkpoint import load, save
from moe_plugin.checkpoint.resize import change_expert_parallel
from moe_plugin.comm import Comm, LocalComm, TorchComm
from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.adapters import add_lora, freeze_experts, merge_lora
from moe_plugin.kernels import frozen as module
from moe_plugin.kernels.frozen import FROZEN_FORMATS
from tests.distributed import run_gloo
from tests.seeds import seeded


class Model(nn.Module):
    """A layer of whole experts, and one whose experts two ranks cut."""

    def __init__(self, comm: Comm, **experts: Any) -> None:
        super().__init__()
        self.settings = experts
        with seeded(5):
            self.enter = nn.Linear(64, 64, dtype=torch.float64)
            self.first = self._layer(comm, 4, "gated_ffn", 1)
            self.second = self._layer(comm, 2, "ffn", comm.size)

    def _layer(self, comm: Comm, experts: int, kind: str, shards: int) -> MoELayer:
        return MoELayer(from_dict({
            "model_dim": 64, "num_experts": experts, "router": {"name": "topk", "top_k": 2},
            "parallel": {"shards": shards}, "experts": {
                "hidden_dim": 128, "kind": kind, **self.settings}}), comm,
            dtype=torch.float64)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.second(self.first(self.enter(x_TD)).output).output


def adapted(comm: Comm, format: str, dora: bool = False, **experts: Any) -> Model:
    model = Model(comm, **experts)
    freeze_experts(model, format)
    with seeded(7):
        add_lora(model, rank=2, freeze=False, use_dora=dora)
    return model


def tokens(comm: Comm, number: int) -> Tensor:
    g = torch.Generator().manual_seed(number)
    return torch.randn(16, 64, generator=g, dtype=torch.float64).chunk(comm.size)[comm.rank]


def train(model: Model, comm: Comm, steps: range, wrapped: nn.Module | None = None) -> Tensor:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for number in steps:
        x_TD = tokens(comm, number)
        optimizer.zero_grad()
        ((wrapped or model)(x_TD) - x_TD.flip(1)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        return model(tokens(comm, 99))


def sharded(folder: Path, format: str, experts: dict[str, Any]) -> Tensor:
    """Of a rank: the same four steps with FSDP2, and a checkpoint of torch after two."""
    comm = TorchComm()
    model = fully_shard_model(adapted(comm, format, **experts))
    train(model, comm, range(2))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    other = fully_shard_model(adapted(comm, format, **experts))
    with torch.no_grad():
        for value in other.parameters():
            value.zero_()
    state = get_model_state_dict(other)
    dcp.load({"model": state}, checkpoint_id=folder)
    set_model_state_dict(other, state)
    return train(other, comm, range(2, 4))


@pytest.mark.distributed
@pytest.mark.parametrize(("format", "store"), [("mxfp4", "device"), ("nf4", "host"),
                                               ("mxfp4", "disk")])
def test_torch_shards_and_saves_the_model(tmp_path: Path, format: str, store: str) -> None:
    experts = {"store": store, **({"store_path": str(tmp_path)} if store == "disk" else {})}
    want = train(adapted(LocalComm(), format), LocalComm(), range(4))
    found = run_gloo(2, sharded, tmp_path / "saved", format, experts)
    torch.testing.assert_close(torch.cat(found), want, rtol=1e-7, atol=1e-9)


def trained(folder: Path, format: str, experts: dict[str, Any]) -> Tensor:
    """Of a rank: four steps, a checkpoint after two."""
    comm = TorchComm()
    model = adapted(comm, format, **experts)
    wrapped = ddp_model(model)
    train(model, comm, range(2), wrapped)
    save(folder, model)
    return train(model, comm, range(2, 4), wrapped)


@pytest.mark.distributed
@pytest.mark.parametrize(("format", "store"), [
    ("nf4", "device"), ("mxfp4", "device"), ("int8", "host"), ("nf4_double", "disk")])
def test_two_ranks_train_as_one_and_one_goes_on(tmp_path: Path, format: str, store: str) -> None:
    alone = LocalComm()
    experts = {"store": store, **({"store_path": str(tmp_path)} if store == "disk" else {})}
    model = adapted(alone, format, **experts)
    before = {name: value.clone() for name, value in model.named_parameters()}
    want = train(model, alone, range(4))
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == (
            ".experts." in name and "lora" not in name), name
    found = run_gloo(2, trained, tmp_path / "saved", format, experts)
    torch.testing.assert_close(torch.cat(found), want, rtol=1e-7, atol=1e-9)
    other = adapted(alone, format, **experts)
    with torch.no_grad():  # the checkpoint has codes: they are read, not made again
        for value in other.parameters():
            value.zero_()
    load(tmp_path / "saved", other)
    torch.testing.assert_close(train(other, alone, range(2, 4)), want, rtol=1e-7, atol=1e-9)
    on_device = adapted(alone, format)  # the store is no part of a checkpoint
    load(tmp_path / "saved", on_device)
    torch.testing.assert_close(train(on_device, alone, range(2, 4)), want, rtol=1e-7, atol=1e-9)
    with pytest.raises(ValueError, match="experts.(scales|codes)_.*has shape"):
        load(tmp_path / "saved", adapted(alone, "mxfp4" if format != "mxfp4" else "nf4", **experts))
    with pytest.raises(ValueError, match="'first.experts.w_.* is missing in the checkpoint|"
                       "'first.experts.codes.* is missing in the model"):
        load(tmp_path / "saved", Model(alone))


@pytest.mark.fast
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("format", FROZEN_FORMATS)
def test_merged_weights_are_rounded_when_asked(format: str, dora: bool) -> None:
    model = adapted(LocalComm(), format, dora)
    train(model, LocalComm(), range(2))
    experts = model.first.experts
    low = experts.compute_parameters().adapters["out"]
    weight = experts.w_out_LFD
    whole = torch.stack([weight.decoded(e, slice(0, 64)).T for e in range(4)]).double()
    whole = whole + low.a_LIR @ low.b_LRO
    whole = whole if low.factor_LO is None else whole * low.factor_LO[:, None]
    for settings in ({}, {"keep": True}, {"keep": True, "requantize": True}):
        with pytest.raises(ValueError, match="'first' is frozen in the format .*requantize=True"):
            merge_lora(model, **settings)
    merge_lora(model, requantize=True)
    for expert in range(4):
        wanted = module.quantized(whole[expert].detach().T, format)
        got = [part[expert] for part in experts.w_out_LFD.parts]
        assert all(map(torch.equal, got, wanted))
    assert experts.adapters is None
    assert not any(p.requires_grad for p in experts.parameters())


@pytest.mark.fast
@pytest.mark.parametrize(("store", "format"), [("host", "int8"), ("disk", "nf4_double")])
def test_stored_codes_are_merged_copied_and_cast(store: str, format: str, tmp_path: Path) -> None:
    """As those on the device, bit for bit."""
    path = {"store_path": str(tmp_path)} if store == "disk" else {}
    results = []
    for experts in ({}, {"store": store, "cache": "64KiB", **path}):
        model = adapted(LocalComm(), format, True, **experts)
        train(model, LocalComm(), range(2))
        other = copy.deepcopy(model)
        merge_lora(other, requantize=True)
        with torch.no_grad():
            results.append([model.float()(tokens(LocalComm(), 1).float()),
                            other.double()(tokens(LocalComm(), 1)),
                            *(value for name, value in sorted(other.state_dict().items())
                              if isinstance(value, Tensor))])
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    assert any(value.dtype == torch.uint8 for value in results[0])


@pytest.mark.fast
def test_what_has_no_answer_is_refused() -> None:
    def block(**settings: Any) -> MoEBlock:
        return MoEBlock(64, num_experts=4, expert_hidden_dim=64, **settings)

    with pytest.raises(ValueError, match="format='fp4' must be one of nf4, nf4_double, mxfp4"):
        freeze_experts(block(), "fp4")
    with pytest.raises(ValueError, match="Linear has no MoELayer.*swap_moe_blocks"):
        freeze_experts(nn.Linear(2, 2))
    for settings, said in (({"expert_precision": "fp8"}, "precision=fp8.*ieee or tf32"),
                           ({"batch_invariant": True}, "batch_invariant=True.*False")):
        with pytest.raises(ValueError, match=said):
            freeze_experts(block(**settings))
    with_adapters = block()
    add_lora(with_adapters)
    with pytest.raises(ValueError, match="already has adapters.*before add_lora"):
        freeze_experts(with_adapters)
    model = adapted(LocalComm(), "int8")
    with pytest.raises(ValueError, match="already frozen in the format int8"):
        freeze_experts(model)
    with pytest.raises(ValueError, match="have no initial values"):
        model.first.experts.reset_parameters()
    merge_lora(model, requantize=True)
    with pytest.raises(ValueError, match="'first' has frozen experts.*moe-plugin reshard"):
        change_expert_parallel(model, None, LocalComm(), LocalComm())
    with pytest.raises(ValueError, match="torch.func cannot transform FrozenExperts"):
        torch.func.grad(lambda x: model(x).sum())(tokens(LocalComm(), 0))
    with pytest.raises(ValueError, match="export does not support FrozenExperts.*freeze_experts"):
        torch.export.export(model, (tokens(LocalComm(), 0),))


@pytest.mark.fast
def test_bytes_survive_every_change_of_the_dtype() -> None:
    block = MoEBlock(64, num_experts=4, expert_hidden_dim=64)
    x = torch.randn(5, 64)
    freeze_experts(block, "nf4")
    before = {name: value.clone() for name, value in block.named_parameters()}
    want = block(x)
    for cast in (nn.Module.double, nn.Module.half, nn.Module.bfloat16, nn.Module.float):
        cast(block)
        dtype = block.moe.experts.bias_in_LF.dtype
        assert block.moe.experts.dtype == dtype
        assert block(x.to(dtype)).dtype == dtype
    for name, value in block.named_parameters():
        assert not value.dtype == torch.uint8 or torch.equal(value, before[name])
    torch.testing.assert_close(block(x), want, rtol=0.05, atol=0.05)  # biases were rounded
    with torch.autocast("cpu", torch.bfloat16):
        out = block(x.requires_grad_())
    out.float().sum().backward()
    torch.testing.assert_close(out.float(), want, rtol=0.1, atol=0.1)


@pytest.mark.fast
def test_each_tile_is_decoded_once_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 64 * 16)
    decoded: list[tuple[int, int]] = []
    own = module.FrozenWeight.decoded

    def noted(self: Any, expert: int, outputs: slice, dtype: Any) -> Tensor:
        decoded.append((expert, outputs.start))
        return own(self, expert, outputs, dtype)

    monkeypatch.setattr(module.FrozenWeight, "decoded", noted)
    block = MoEBlock(64, num_experts=4, expert_hidden_dim=64, top_k=1)
    freeze_experts(block)
    add_lora(block)
    x = torch.randn(1, 64).requires_grad_()
    out = block(x)
    assert len(decoded) == 2 * 4  # two weights of the one expert that has a row
    out.sum().backward()
    assert len(decoded) == 4 * 4
