"""Layers joined by `pregate.link`: outputs, losses and all gradients equal a dense computation in
which every gate but the first reads the tokens of the block before; with and without recomputation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moe_plugin.comm import run_simulated
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import from_dict
from moe_plugin.dispatch import ragged
from moe_plugin.layer import MoELayer
from moe_plugin.output import weighted_loss
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.records import TokenInfo
from moe_plugin.routing import pregate, routers
from moe_plugin.routing.replay import checkpoint, record_routing, replay_routing
from tests.exactness.harness import NAMES, config_of, load_experts, slice_of
from tests.exactness.test_routers import give_parameters, token_ids
from tests.oracle import Case, expert, losses, make_inputs, make_parameters, objective, route
from tests.routing.references import reference_of
from tests.seeds import seeded

pytestmark = pytest.mark.fast

BLOCKS = 3
RUNS: dict[str, Callable[..., Any] | None] = {
    "kept": None,
    "ours": checkpoint,
    "plain": lambda block, *args: torch_checkpoint(block, *args, use_reentrant=False),
    "reentrant": lambda block, *args: torch_checkpoint(block, *args, use_reentrant=True),
}


class Block(nn.Module):
    """x + experts(x), and the weighted losses."""

    def __init__(self, moe: MoELayer) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = self.moe(x, mask)
        return x + out.output, weighted_loss(out.losses, self.moe.config.losses)


def case_of(world: int, block: int = 0, **changes: Any) -> Case:
    tokens = [5, 0] if world == 2 else [7]
    return Case(**{"world": world, "experts": 4, "top_k": 2, "tokens": tokens, "masked": [2, 0][
        :world], "seed": 10 * block, **changes})


def build(case: Case, comm: Any = None, pre_gate: int = 1, blocks: int = BLOCKS) -> nn.ModuleList:
    made = []
    for n in range(blocks):
        of_block = case_of(case.world, n, top_k=case.top_k)
        layer = MoELayer(config_of(case, router__pre_gate=pre_gate), comm,
                         host=HostContext(layer_number=n), dtype=torch.float64)
        p = make_parameters(of_block)
        load_experts(layer, p, of_block)
        with torch.no_grad():
            layer.router.weight_ED.copy_(p["router"])
        made.append(Block(layer))
    model = nn.ModuleList(made)
    assert pregate.link(model) == (blocks - 1 if pre_gate else 0)
    return model


def run(model: nn.ModuleList, x: Tensor, mask: Tensor | None = None,
        through: Callable[..., Any] | None = None) -> tuple[Tensor, Tensor]:
    total: Any = 0
    for block in model:
        x, loss = block(x, mask) if through is None else through(block, x, mask)
        total = total + loss
    return x, total


def gradients(model: nn.ModuleList) -> list[dict[str, Tensor]]:
    found = []
    for block in model:
        experts = block.moe.experts
        found.append({name: getattr(experts, attribute).grad.clone()
                      for name, (attribute, _) in NAMES.items()
                      if getattr(experts, attribute, None) is not None})
        found[-1]["router"] = block.moe.router.weight_ED.grad.clone()
    return found


def dense(case: Case) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
    """Outputs and input gradients of each rank, and gradients of each block, summed over ranks."""
    blocks = [case_of(case.world, n, top_k=case.top_k) for n in range(BLOCKS)]
    ps = [{name: value.requires_grad_() for name, value in make_parameters(one).items()}
          for one in blocks]
    xs, masks = make_inputs(case)
    outputs, total = [], torch.zeros((), dtype=torch.float64)
    xs = [x.requires_grad_() for x in xs]
    for rank, (h, m) in enumerate(zip(xs, masks, strict=True)):
        before, loss = h, 0.0
        for one, p in zip(blocks, ps, strict=True):
            chosen, weights, logits, scores = route(one, p, before, m)
            rows = [sum((w * expert(one, p, e, h[t])
                         for e, w in zip(chosen[t], weights[t], strict=True)),
                        torch.zeros(one.width, dtype=torch.float64)) for t in range(len(h))]
            loss = loss + sum(losses(one, chosen, logits, scores, m).values())
            before, h = h, h + (torch.stack(rows) if rows else h * 0)
        outputs.append(h.detach())
        total = total + objective(h, {}, rank) + loss
    total.backward()
    return outputs, [x.grad for x in xs], [{n: v.grad for n, v in p.items()} for p in ps]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("world", [1, 2])
def test_equals_a_dense_computation(world: int, name: str) -> None:
    case = case_of(world)

    def rank(comm: Any) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
        model = build(case, comm)
        xs, masks = make_inputs(case)
        x = xs[comm.rank].requires_grad_()
        y, loss = run(model, x, masks[comm.rank], RUNS[name])
        (objective(y, {}, comm.rank) + loss).backward()
        return y.detach(), x.grad, gradients(model)

    seen = run_simulated(world, rank)
    outputs, input_grads, grads = dense(case)
    close = dict(rtol=1e-10, atol=1e-10)
    for r, (y, x_grad, mine) in enumerate(seen):
        torch.testing.assert_close(y, outputs[r], **close)
        torch.testing.assert_close(x_grad, input_grads[r], **close)
        for whole, own in zip(grads, mine, strict=True):
            for key in NAMES:
                if key in own:
                    torch.testing.assert_close(own[key], slice_of(key, whole[key], case, r),
                                               **close)
    for n, whole in enumerate(grads):
        total = sum(one[2][n]["router"] for one in seen)
        torch.testing.assert_close(total, whole["router"], **close)


class CountedSizes:
    """How often a rank asked others for the sizes of a call when it needed them, and early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.late, self.early = [0, 0], [0, 0]
        for name, counts in (("agreed_sizes", self.late), ("start_sizes", self.early)):
            def counted(owner: Any, place: Any, *args: Any, _real: Any = getattr(ragged, name),
                        _counts: list[int] = counts) -> Any:
                _counts[place.comm.rank] += 1
                return _real(owner, place, *args)

            monkeypatch.setattr(ragged, name, counted)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("choice", [None, LayoutChoice(r=1, d=2)], ids=["as expected", "another"])
def test_sizes_are_exchanged_one_block_early(name: str, choice: LayoutChoice | None,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a pass, also where a block is computed again; a layout that was not expected agrees
    again, with the same result.
    """
    counted, case = CountedSizes(monkeypatch), case_of(2)

    def rank(comm: Any) -> tuple[Tensor, list[dict[str, Tensor]]]:
        model = build(case, comm)
        if choice is not None:
            forward = model[1].moe.forward
            model[1].moe.forward = lambda *args: forward(*args, choice=choice)
        xs, masks = make_inputs(case)
        y, loss = run(model, xs[comm.rank].requires_grad_(), masks[comm.rank], RUNS[name])
        (objective(y, {}, comm.rank) + loss).backward()
        return y.detach(), gradients(model)

    seen = run_simulated(2, rank)
    passes = 1 if name == "kept" else 2
    assert counted.early == [BLOCKS - 1] * 2
    assert counted.late == [passes * (1 if choice is None else 2)] * 2
    outputs, _, grads = dense(case)
    for r, (y, mine) in enumerate(seen):
        torch.testing.assert_close(y, outputs[r], rtol=1e-10, atol=1e-10)
        for whole, own in zip(grads, mine, strict=True):
            for key in set(NAMES) & set(own):
                torch.testing.assert_close(own[key], slice_of(key, whole[key], case, r),
                                           rtol=1e-10, atol=1e-10)


def test_sizes_that_a_capacity_changes_are_not_exchanged_early(
        monkeypatch: pytest.MonkeyPatch) -> None:
    counted, case = CountedSizes(monkeypatch), case_of(2, factor=1.0)

    def rank(comm: Any) -> None:
        xs, masks = make_inputs(case)
        run(build(case, comm), xs[comm.rank], masks[comm.rank])

    run_simulated(2, rank)
    assert counted.early == [0, 0] and counted.late == [BLOCKS] * 2


def test_a_block_that_changes_nothing_hands_on_what_the_next_gate_would_choose() -> None:
    # the first block is the identity, so the second one's gate reads the same tokens in both models
    case = case_of(1)
    models = [build(case, pre_gate=pre_gate, blocks=2) for pre_gate in (0, 1)]
    seen = []
    for model in models:
        with torch.no_grad():
            model[0].moe.experts.w_out_LFD.zero_()
            model[0].moe.experts.bias_out_LD.zero_()
        xs, masks = make_inputs(case)
        x = xs[0].requires_grad_()
        y, loss = run(model, x, masks[0])
        (objective(y, {}, 0) + loss).backward()
        seen.append((y, loss, x.grad, gradients(model)[1]))
    for ordinary, pre_gated in zip(*seen, strict=True):
        torch.testing.assert_close(pre_gated, ordinary, rtol=1e-12, atol=1e-12)
    assert torch.equal(seen[0][0], seen[1][0])


@pytest.mark.parametrize("name", RUNS)
def test_micro_batches_of_other_sizes_in_flight(name: str) -> None:
    case = case_of(1)
    xs = [torch.randn(n, case.width, dtype=torch.float64,
                      generator=torch.Generator().manual_seed(n)) for n in (6, 3, 0, 5)]
    apart, together = (build(case) for _ in range(2))

    def forward(model: nn.ModuleList, x: Tensor) -> Tensor:
        y, loss = run(model, x.clone().requires_grad_(), None, RUNS[name])
        return objective(y, {}, 0) + loss

    for x in xs:
        forward(apart, x).backward()
    pending = []
    for n, x in enumerate(xs):  # two under way at a time, as in a pipeline
        pending.append(forward(together, x))
        if n:
            pending.pop(0).backward()
    with torch.no_grad():  # an evaluation in between
        together.eval()
        run(together, xs[0])
        together.train()
    pending.pop(0).backward()
    for one, other in zip(gradients(apart), gradients(together), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", [name for name in routers.names() if not name.startswith("test_")])
def test_every_router_chooses_early_and_is_recomputed(name: str) -> None:
    """The same numbers with and without recomputation."""

    def rank(comm: Any) -> list[list[dict[str, Tensor]]]:
        found = []
        for through in (None, checkpoint):
            config = from_dict({"model_dim": 8, "num_experts": 4, "experts": {"hidden_dim": 16},
                                "router": {"name": name, "pre_gate": 1, "noise": 0.0,
                                           **reference_of(name).settings}})
            with seeded(1):
                model = nn.ModuleList(Block(MoELayer(config, comm, dtype=torch.float64))
                                      for _ in range(2))
            for block in model:
                give_parameters(block.moe.router)
            pregate.link(model)
            x = torch.linspace(-1, 1, 6 * 8, dtype=torch.float64).view(6, 8).requires_grad_()
            info = TokenInfo(token_ids(x))
            h = x
            for block in model:
                def call(y: Tensor, block: Block = block) -> Tensor:
                    return y + block.moe(y, info=info).output
                h = call(h) if through is None else through(call, h)
            h.square().sum().backward()
            found.append([x.grad, *(p.grad for p in model[1].moe.router.parameters())])
        return found

    for plain, recomputed in run_simulated(1, rank):
        assert len(plain) == len(recomputed)
        for one, other in zip(plain, recomputed, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


def test_a_copy_and_a_recorded_routing() -> None:
    case = case_of(1)
    model = build(case)
    xs, _ = make_inputs(case)
    with record_routing() as tape:
        y, _ = run(model, xs[0])
    other = copy.deepcopy(model)
    assert other[0].moe.link.following is other[1].moe
    with replay_routing(tape):
        assert torch.equal(run(other, xs[0])[0], y)
    assert all(isinstance(choice, Tensor) for choice in tape.ids)


def test_a_pass_that_ended_early_is_forgotten() -> None:
    case = case_of(1)
    model = build(case)
    x = make_inputs(case)[0][0]
    want, _ = run(model, x)
    model[0](torch.randn(2, case.width, dtype=torch.float64))
    assert torch.equal(run(model, x)[0], want)
    model[0](x)
    for block in model:
        block.moe.forget()
    with pytest.raises(ValueError, match="No pre-gate has .*for these 7 tokens.*the order"):
        model[1](x)


def test_what_does_not_fit_is_named() -> None:
    case = case_of(1)
    x = make_inputs(case)[0][0]
    config = config_of(case, router__pre_gate=1)
    with pytest.raises(ValueError, match=r"router\.pre_gate=1 .*pregate\.link\(model\)"):
        MoELayer(config, dtype=torch.float64)(x)
    with pytest.raises(ValueError, match=r"pre_gate=\[1, 0\] differs"):
        pregate.link(nn.ModuleList([MoELayer(config), MoELayer(config_of(case))]))
    with pytest.raises(ValueError, match="width 8 and 16"):
        wide = config_of(case_of(1, width=16), router__pre_gate=1)
        pregate.link(nn.ModuleList([MoELayer(config), MoELayer(wide)]))
    with pytest.raises(ValueError, match=r"router\.pre_gate=2"):
        config_of(case, router__pre_gate=2)
    model = build(case)
    model[0](x)
    with pytest.raises(ValueError, match="for 7 tokens, but the next block received 3"):
        model[1](x[:3])
    model[0](x)
    with pytest.raises(ValueError, match="top_k=1 differs from the 2 experts per token"):
        model[1].moe(x, top_k=1)
