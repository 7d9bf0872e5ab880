"""Activations of experts that are computed again in backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from moe_plugin.config import from_dict
from moe_plugin.dispatch.base import dispatchers
from moe_plugin.experts import strategies
from moe_plugin.hosts.plain.adapters import add_lora
from moe_plugin.kernels.cpu import expert_ffn as cpu_ffn
from moe_plugin.kernels.cpu.native.functions import passes
from moe_plugin.layer import MoELayer
from moe_plugin.tuning import compute_tuner
from tests.combinations import Cell, all_pairs
from tests.distributed import run_gloo
from tests.experts.problems import make_layer, parameters, problem
from tests.kernels.compiled_or_not import compiled
from tests.kernels.problems import Shape

# torch's non-reentrant checkpoint of a layer, with its default check that the recomputation saves
# the same tensors as the forward pass: every dispatcher, strategy and kind of adapter.


CELLS = all_pairs({
    "dispatcher": [entry.name for entry in dispatchers if not entry.why_not()],
    "compute": [entry.name for entry in strategies if not entry.why_not()],
    "adapter": ["none", "lora", "dora"], "kind": ["ffn", "gated_ffn"], "kept": [False, True]})


def gradients(layer: MoELayer, x_TD: Tensor, recompute: bool) -> list[Tensor]:
    layer.zero_grad()
    x_TD = x_TD.clone().requires_grad_()
    y_TD = (checkpoint(lambda x: layer(x).output, x_TD, use_reentrant=False) if recompute
            else layer(x_TD).output)
    y_TD.square().sum().backward()
    return [y_TD.detach(), x_TD.grad,
            *(p.grad for p in layer.parameters() if p.grad is not None)]


def check(dispatcher: str, compute: str, adapter: str, kind: str, kept: bool) -> None:
    """The first call of a layer is recomputed, and its gradients are those of a plain call."""
    torch.manual_seed(1)
    layer = MoELayer(16, num_experts=4, router={"top_k": 2},
                     dispatch={"name": dispatcher, "capacity_factor": 2.0},
                     experts={"hidden_dim": 16, "compute": compute, "kind": kind,
                              "recompute_activation": kept})
    if adapter != "none":
        add_lora(layer, 2, use_dora=adapter == "dora", freeze=False)
    x_TD = torch.randn(24, 16)
    got = gradients(layer, x_TD, True)
    for one, other in zip(got, gradients(layer, x_TD, False), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.fast
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell.values())))
def test_every_pair_of_settings(cell: Cell) -> None:
    check(**cell)


def _rank() -> None:
    for cell in CELLS[::2]:
        check(**cell)


@pytest.mark.distributed
def test_two_ranks() -> None:
    run_gloo(2, _rank)


def test_a_measured_choice_holds_for_the_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that measures the strategies is recomputed by the one that was chosen then."""
    monkeypatch.setattr(compute_tuner, "SMALL_LAYER", 1)
    torch.manual_seed(1)
    layer = MoELayer(from_dict({"model_dim": 16, "num_experts": 4, "router": {"top_k": 2},
                                "experts": {"hidden_dim": 16, "compute_selection": "measured"}}))
    for tokens in (16, 256, 16):
        x_TD = torch.randn(tokens, 16)
        for one, other in zip(gradients(layer, x_TD, True), gradients(layer, x_TD, False),
                              strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# Activations that are computed again in backward: the same gradients, less kept.


MANY = Shape(64, 4, 8, 2, 32)
NAMES = ["loop", "batched", "grouped", "fused"]


class Kept(TorchDispatchMode):
    """Counts the tensors of one shape that are alive."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and tuple(leaf.shape) == self.shape:
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage)
        return out

    def count(self) -> int:
        """How many of them something still holds."""
        return sum(not ref.expired() for ref in self.made.values())


def _pass(name: str, gated: bool, activation: str, recompute: bool,
          monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Tensor]]:
    """(tensors [R, F] alive between forward and backward, output and all gradients)"""
    monkeypatch.setattr(cpu_ffn, "BLOCK_BYTES", 1)  # its buffer for a block is none for all rows
    x, gates, named, plan = problem(MANY, gated, True, False, torch.float32)
    p = dataclasses.replace(parameters(named, activation), recompute=recompute)
    with Kept((plan.counts.total, MANY.inner)) as kept:
        y = strategies.get(name)(x, plan, p)
    alive = kept.count()
    y.square().sum().backward()
    return alive, [y.detach(), x.grad, gates.grad, *(t.grad for t in named.values()
                                                     if t is not None)]


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", [*NAMES, "fused by torch"])
def test_same_gradients_with_less_kept(name: str, gated: bool, activation: str,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    name, by_torch = name.removesuffix(" by torch"), name.endswith(" by torch")
    if (why := strategies.entry(name).why_not()) is not None:
        pytest.skip(why)
    by_torch = by_torch or passes(torch.ones(1), activation) is None
    with compiled(not by_torch):
        kept, plain = _pass(name, gated, activation, False, monkeypatch)
        less, again = _pass(name, gated, activation, True, monkeypatch)
    for one, other in zip(again, plain, strict=True):
        assert torch.equal(one, other)
    # the values before the activation, and one more factor of a gated expert
    assert less == 1 + gated
    # torch's relu keeps its result alone; `fused` keeps no value after a cheap activation anyway,
    # and compiled passes none of a gated expert
    spares = name == "fused" and (activation == "relu" or (gated and not by_torch))
    assert kept > less or spares or (activation == "relu" and not gated)


def _gradients(**experts: Any) -> list[Tensor]:
    torch.manual_seed(1)
    layer = make_layer(experts={"hidden_dim": 24, "compute": "loop", **experts}).double()
    x = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)
    y = layer(x).output
    first = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, *layer.parameters()])
    return [y.detach(), *first, *second]


@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
def test_a_layer_has_the_same_first_and_second_derivatives(kind: str) -> None:
    plain, again = (_gradients(kind=kind, recompute_activation=flag) for flag in (False, True))
    for one, other in zip(again, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def _twice(recompute: bool, reentrant: bool) -> list[Tensor]:
    torch.manual_seed(1)
    layer = make_layer(experts={"hidden_dim": 24, "compute": "loop", "dropout": 0.0,
                                "recompute_activation": recompute})
    x = torch.randn(20, 16, requires_grad=True)
    checkpoint(lambda x: layer(x).output, x, use_reentrant=reentrant).square().sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    for one, other in zip(_twice(True, reentrant), _twice(False, reentrant), strict=True):
        assert torch.equal(one, other)


def test_backward_twice_through_a_kept_graph() -> None:
    layer = make_layer(experts={"hidden_dim": 24, "compute": "loop", "recompute_activation": True})
    loss = layer(torch.randn(20, 16)).output.square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in layer.parameters()]
    loss.backward()
    for parameter, grad in zip(layer.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad)
