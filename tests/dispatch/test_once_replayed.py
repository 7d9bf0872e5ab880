"""Rows sent once where a choice is made once and used again, or given: recomputed layers, recorded
routing, even routing, rollouts. Each send gives what rows sent for each choice give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Topology, run_simulated
from moe_plugin.planner.choice import SENDS
from moe_plugin.routing.replay import checkpoint, record_routing, replay_routing
from moe_plugin.routing.rollouts import replay_rollouts
from tests.exactness.harness import config_of, load
from tests.oracle import Case, make_inputs, make_parameters

pytestmark = pytest.mark.fast

CASE = Case(4, 8, 3, [6, 0, 8, 5], None, None, skew=1.0)


def plain(layer: MoELayer, x_TD: Tensor) -> Tensor:
    return layer(x_TD).output


def recomputed(layer: MoELayer, x_TD: Tensor) -> Tensor:
    return checkpoint(lambda x: layer(x).output, x_TD)


def recorded(layer: MoELayer, x_TD: Tensor) -> Tensor:
    """Routing that is recorded, and replayed by a router that would choose the worst experts."""
    with record_routing() as tape, torch.no_grad():
        layer(x_TD)
        layer.router.weight_ED.neg_()
    with replay_routing(tape):
        return layer(x_TD).output


def rolled_out(layer: MoELayer, x_TD: Tensor) -> Tensor:
    """Experts by the engine that generated the tokens; of some the router chooses itself."""
    g = torch.Generator().manual_seed(layer.comm.rank)
    ids_TK = torch.rand(len(x_TD), 8, generator=g).argsort(1)[:, :3]
    ids_TK[::3] = -1
    with replay_rollouts(layer, ids_TK[:, None]):
        return layer(x_TD).output


CALLS: dict[str, tuple[Callable[[MoELayer, Tensor], Tensor], dict[str, Any]]] = {
    "recomputed": (recomputed, {}), "recorded": (recorded, {}), "rolled out": (rolled_out, {}),
    "forced": (plain, {"router__force": "balance"}),
    "forced, recomputed": (recomputed, {"router__force": "balance"})}


def results(call: Callable[[MoELayer, Tensor], Tensor], **settings: Any) -> list[list[Tensor]]:
    """Of each rank: output and all gradients."""
    config = config_of(CASE, **settings)

    def rank(comm: Comm) -> list[Tensor]:
        layer = MoELayer(config, comm, dtype=torch.float64)
        load(layer, make_parameters(CASE), CASE)
        x_TD = make_inputs(CASE)[0][comm.rank].clone().requires_grad_()
        y_TD = call(layer, x_TD)
        y_TD.square().sum().backward()
        return [y_TD.detach(), x_TD.grad, *(p.grad for p in layer.parameters())]

    return run_simulated(4, rank, topology=Topology.uniform(4, 2))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dispatch", ["ragged", "bounded"])
def test_choices_that_are_used_again_travel_once(name: str, dispatch: str) -> None:
    call, settings = CALLS[name]
    wanted, *once = (results(call, dispatch__name=dispatch, dispatch__send=send, **settings)
                     for send in SENDS)
    for found in once:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    own = results(plain, dispatch__name=dispatch)
    same = all(torch.allclose(a, b) for a, b in zip(own[0], wanted[0], strict=True))
    assert same == (name == "recomputed")  # the others do not choose as the router would
