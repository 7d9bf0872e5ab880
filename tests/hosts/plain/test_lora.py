"""`add_lora`: what trains, what is kept, saved and loaded, also over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoEBlock, MoELayer, ddp_model, optimizer_groups
from moe_plugin.checkpoint import load, save
from moe_plugin.checkpoint.resize import change_expert_parallel
from moe_plugin.comm import Comm, LocalComm, TorchComm
from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.adapters import add_lora, merge_lora, unmerge_lora
from tests.distributed import run_gloo
from tests.seeds import seeded


class Model(nn.Module):
    """A layer of whole experts, and one whose experts two ranks cut."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        with seeded(5):
            self.enter = nn.Linear(8, 8, dtype=torch.float64)
            self.first = self._layer(comm, 4, "gated_ffn", 1)
            self.second = self._layer(comm, 2, "ffn", comm.size)

    def _layer(self, comm: Comm, experts: int, kind: str, shards: int) -> MoELayer:
        return MoELayer(from_dict({
            "model_dim": 8, "num_experts": experts, "router": {"name": "topk", "top_k": 2},
            "parallel": {"shards": shards}, "experts": {"hidden_dim": 16, "kind": kind}}), comm,
            dtype=torch.float64)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.second(self.first(self.enter(x_TD)).output).output


def adapted(comm: Comm, **settings: Any) -> Model:
    model = Model(comm)
    with seeded(7):
        add_lora(model, **{"rank": 4, "experts": [0, 1], **settings})
    return model


def tokens(comm: Comm, number: int) -> Tensor:
    g = torch.Generator().manual_seed(number)
    return torch.randn(16, 8, generator=g, dtype=torch.float64).chunk(comm.size)[comm.rank]


def train(model: Model, optimizer: torch.optim.Optimizer, comm: Comm, steps: range,
          wrapped: nn.Module | None = None) -> None:
    for number in steps:
        x_TD = tokens(comm, number)
        optimizer.zero_grad()
        ((wrapped or model)(x_TD) - x_TD.flip(1)).square().mean().backward()
        optimizer.step()


def outputs(model: Model, comm: Comm) -> Tensor:
    with torch.no_grad():
        return model(tokens(comm, 99))


def trained(folder: Path, dora: bool) -> Tensor:
    """Of a rank: four steps, a checkpoint after two."""
    comm = TorchComm()
    model = adapted(comm, use_dora=dora, freeze=False)
    wrapped = ddp_model(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    train(model, optimizer, comm, range(2), wrapped)
    save(folder, model, optimizer)
    train(model, optimizer, comm, range(2, 4), wrapped)
    return outputs(model, comm)


@pytest.mark.distributed
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_two_ranks_train_as_one_and_one_goes_on(tmp_path: Path, dora: bool) -> None:
    """Adapters of experts that are whole, and of experts that are cut: drawn, trained, saved."""
    alone = LocalComm()
    model = adapted(alone, use_dora=dora, freeze=False)
    start, rest = outputs(model, alone), {n: p.clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    train(model, optimizer, alone, range(4))
    want = outputs(model, alone)
    assert (want - start).abs().max() > 0.1
    for name, value in model.named_parameters():
        frozen = ".experts." in name and "lora" not in name
        assert torch.equal(value, rest[name]) == frozen, name
    found = run_gloo(2, trained, tmp_path / "saved", dora)
    torch.testing.assert_close(torch.cat(found), want, rtol=1e-7, atol=1e-9)
    other = adapted(alone, use_dora=dora, freeze=False)
    optimizer = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.05)
    load(tmp_path / "saved", other, optimizer)
    train(other, optimizer, alone, range(2, 4))
    torch.testing.assert_close(outputs(other, alone), want, rtol=1e-7, atol=1e-9)


@pytest.mark.fast
def test_frozen_experts_keep_neither_gradients_nor_state() -> None:
    model = Model(LocalComm())
    model(tokens(LocalComm(), 0)).sum().backward()
    add_lora(model)
    assert all(p.grad is None for p in model.parameters())
    groups = optimizer_groups(model, 0.1, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer, LocalComm(), range(1))
    for name, parameter in model.named_parameters():
        kept = parameter.grad is not None, bool(optimizer.state.get(parameter))
        assert kept == ("lora_" in name,) * 2, name
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert elements == sum(p.numel() for group in groups for p in group["params"])


@pytest.mark.fast
def test_backward_keeps_no_sum_of_weights() -> None:
    """What autograd saves beside parameters is rows: less than one expert's matrix is for them."""
    block = MoEBlock(64, num_experts=8, expert_hidden_dim=64, expert_kind="gated_ffn")
    add_lora(block, rank=2)
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved = []

    def pack(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in own and value.shape[1:] == (64, 64):
            saved.append(value.shape)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = block(torch.randn(4, 64)).sum()
    loss.backward()
    assert not saved


@pytest.mark.fast
def test_which_experts_get_which_rank() -> None:
    model = Model(LocalComm())
    names = add_lora(model, 4, 8.0, targets=["down"], experts=[1],
                     rank_pattern={r"first\.experts\.3\.down": 2, "second.*": 0})
    assert names == ["first"]
    [x] = [model.first.experts]
    assert x.adapters.ranks == {"out": [0, 4, 0, 2]} and x.lora_a_out_LFR.shape == (4, 16, 4)
    scales = x.adapters.scale_LR("out", 0, x.lora_b_out_LRD)
    assert scales.tolist() == [[0.0] * 4, [2.0] * 4, [0.0] * 4, [4.0, 4.0, 0.0, 0.0]]
    model(tokens(LocalComm(), 0)).sum().backward()
    touched = x.lora_b_out_LRD.grad.abs().sum(2) > 0
    assert touched.tolist() == [[False] * 4, [True] * 4, [False] * 4, [True, True, False, False]]
    rooted = Model(LocalComm())
    add_lora(rooted, 4, 8.0, use_rslora=True)
    assert rooted.first.experts.adapters.scale("in", 4) == 4.0


@pytest.mark.fast
def test_16_bits_under_autocast_and_dropout() -> None:
    block = MoEBlock(16, num_experts=4, expert_hidden_dim=32, expert_dropout=0.1)
    add_lora(block, rank=8)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(torch.randn(12, 16))
    out.float().sum().backward()
    assert block.moe.experts.lora_b_in_LRF.grad.isfinite().all()
    half = MoEBlock(16, num_experts=4, expert_hidden_dim=32).bfloat16()
    nn.init.zeros_(half.moe.experts.w_in_LDF)
    add_lora(half, rank=8, use_dora=True)
    with torch.inference_mode():
        half(torch.randn(12, 16).bfloat16())
    half(torch.randn(12, 16).bfloat16()).sum().backward()
    grad = half.moe.experts.lora_m_in_LF.grad
    assert grad.dtype == torch.bfloat16 and grad.isfinite().all()


@pytest.mark.fast
def test_what_has_no_answer_is_refused() -> None:
    for settings, said in (
            ({"rank": 0}, "rank=0 must be >= 1"), ({"experts": [4]}, "4, but layer .* 0..3"),
            ({"rank_pattern": {"first.*": -1}}, "rank_pattern=.*-1, but ranks must be >= 0"),
            ({"targets": "down"}, "targets='down' must be a list of gate_up, down"),
            ({"experts": []}, "leaves no expert with an adapter")):
        with pytest.raises(ValueError, match=said):
            add_lora(MoEBlock(8, num_experts=4), **settings)
    with pytest.raises(ValueError, match="Linear has no MoELayer.*swap_moe_blocks"):
        add_lora(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="of the type StoredExperts.*experts.store=device"):
        add_lora(MoEBlock(8, num_experts=4, experts={"store": "host"}))
    with pytest.raises(ValueError, match="no experts with adapters.*add_lora"):
        merge_lora(Model(LocalComm()))
    model = adapted(LocalComm())
    with pytest.raises(ValueError, match="already has adapters.*merge_lora"):
        add_lora(model)
    with pytest.raises(ValueError, match="not merged.*keep=True"):
        unmerge_lora(model)
    with pytest.raises(ValueError, match="'first' has adapters.*merge_lora"):
        change_expert_parallel(model, None, LocalComm(), LocalComm())
    merge_lora(model, keep=True)
    with pytest.raises(ValueError, match="are already merged.*unmerge_lora"):
        merge_lora(model)


@pytest.mark.fast
def test_first_factors_are_drawn_in_float32() -> None:
    """Each value is that of the generator, and not one of the few of a smaller dtype."""
    experts = adapted(LocalComm()).first.routed_experts.experts
    drawn = [value for value in experts.used_adapters().values() if value.any()]
    assert drawn
    for value in drawn:
        assert torch.equal(value, value.float().double())
        assert not torch.equal(value, value.bfloat16().double())
