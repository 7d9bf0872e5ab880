"""Rows sent once: on any nodes, in any dtype and wire format; choices that are made once and used
again; what is refused. tests/exactness has all layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Topology, run_simulated
from moe_plugin.comm.algorithms import algorithms
from moe_plugin.comm.placement import Placement
from moe_plugin.config import from_dict
from moe_plugin.dispatch.base import DispatchContext
from moe_plugin.dispatch.once import OnceDispatcher
from moe_plugin.dispatch.once_nodes import OnceToNodesDispatcher
from moe_plugin.dispatch.rows_limit import overflowed
from moe_plugin.planner.choice import SENDS
from moe_plugin.records import KeptRouting
from moe_plugin.routing.replay import checkpoint, record_routing, replay_routing
from moe_plugin.routing.rollouts import replay_rollouts
from moe_plugin.training.resilience.skipped_steps import limits_of
from moe_plugin.tuning.default_hardware import as_visits, count_visits
from tests.dispatch.fixed_routing import UNEQUAL, WIDTH, Fixed, drawn
from tests.exactness.harness import compare, config_of, loaded, naming, reference, run_rank
from tests.oracle import Case, make_inputs

pytestmark = pytest.mark.fast


# Rows sent once: on any nodes, in any dtype and wire format; what is refused. In all layouts:
# tests/exactness. Bytes: `test_once_bytes.py`.


NODES = [Topology.uniform(4, 2), Topology.one_node(4), UNEQUAL]


def test_a_token_may_choose_an_expert_twice() -> None:
    """As a router of one's own may; every send gives what rows sent for each choice give."""
    torch.manual_seed(0)
    ids_WTK = [torch.tensor([[0, 0, 3], [3, 3, 3], [2, 1, 2], [-1, 3, 0]])] * 4
    x_WTD = torch.randn(4, 4, WIDTH, dtype=torch.float64)

    def rank(comm: Comm, send: str) -> list[Tensor]:
        config = from_dict({"model_dim": WIDTH, "num_experts": 4, "losses": {},
                            "parallel": {"r": 1}, "dispatch": {"send": send},
                            "router": {"top_k": 3}})
        router = Fixed(ids_WTK[comm.rank])
        layer = MoELayer(config, comm, router=router, dtype=torch.float64)
        for p in layer.parameters():  # ranks are threads that share a generator
            nn.init.constant_(p, 0.5).data.view(-1)[::3] = -0.25
        x = x_WTD[comm.rank].clone().requires_grad_()
        out = layer(x).output
        out.square().sum().backward()
        return [out.detach(), x.grad, router.weights_TK.grad]

    rows, *others = (run_simulated(4, partial(rank, send=send), topology=Topology.uniform(4, 2))
                     for send in ("rows", "ranks", "nodes"))
    for other in others:
        torch.testing.assert_close(other, rows)


@pytest.mark.parametrize("send,topology", [
    ("rows", NODES[0]), ("ranks", NODES[0]), ("nodes", NODES[0]), ("nodes", UNEQUAL)])
def test_rows_that_did_not_fit_leave_no_gradient(send: str, topology: Topology) -> None:
    """Bounded ones, of a loss whose own gradient is finite: all of the output, of the input's and
    of the gates' gradients are NaN, of choices that travelled and of those that did not.
    """
    world = topology.size
    config = from_dict({
        "model_dim": WIDTH, "num_experts": 2 * world, "losses": {}, "router": {"top_k": 3},
        "parallel": {"r": 1}, "dispatch": {"name": "bounded", "send": send, "max_tokens": 9,
                                           "max_rows_factor": 0.5}})

    def rank(comm: Comm) -> list[Tensor]:
        router = Fixed(drawn(world, 2 * world, 3, [9])[0].clamp(min=0))
        layer = MoELayer(config, comm, router=router, dtype=torch.float64)
        x = torch.randn(9, WIDTH, dtype=torch.float64, requires_grad=True)
        out = layer(x).output
        out.sum().backward()
        return [out, x.grad, router.weights_TK.grad]

    for found in run_simulated(world, rank, topology=topology):
        assert [bool(values.isnan().all()) for values in found] == [True] * 3


@pytest.mark.parametrize("send", SENDS)
def test_bounded_rows_have_no_room_for_an_expert_twice(send: str) -> None:
    """A bound of the experts of a rank relies on routers; one that breaks it is found, and has room
    in the next step where overflow repeats.
    """
    config = from_dict({
        "model_dim": WIDTH, "num_experts": 4, "losses": {}, "router": {"top_k": 3},
        "parallel": {"r": 1}, "dispatch": {"name": "bounded", "send": send,
                                           "on_overflow": "repeat"}})

    def rank(comm: Comm) -> tuple[bool, int, bool]:
        layer = MoELayer(config, comm, router=Fixed(torch.full((5, 3), 2)), dtype=torch.float64)
        [limit] = limits_of([layer])
        x = torch.randn(5, WIDTH, dtype=torch.float64)
        lost, needed = layer(x).output.isnan().all(), int(limit.needed)
        assert overflowed([limit], comm)
        return bool(lost), needed, bool(layer(x).output.isfinite().all())

    assert run_simulated(4, rank, topology=NODES[0]) == [(True, 15, True)] * 4


@pytest.mark.parametrize("send", ["ranks", "nodes"])
@pytest.mark.parametrize("experts,r", [(12, 1), (3, 1), (3, 2)])
def test_visits_are_the_rows_that_travel(send: str, experts: int, r: int) -> None:
    """What layouts are predicted from, for experts that are whole and cut: on any nodes exactly
    the rows that the dispatcher sends.
    """
    ids_WTK = drawn(6, experts, 3, [9, 4, 7])

    def rank(comm: Comm) -> tuple[int, float]:
        routing = Fixed(ids_WTK[comm.rank])(torch.zeros(len(ids_WTK[comm.rank]), WIDTH))
        place = Placement(comm, experts, algorithms.get("linear"), copies=r)
        kind = OnceDispatcher if send == "ranks" else OnceToNodesDispatcher
        plan = kind(DispatchContext(place)).plan(KeptRouting(routing, None, None, routing))
        visits = as_visits(count_visits(routing, place, [1, r]), [1, r], 3)[r]
        tokens = int((routing.ids_TK >= 0).sum()) / 3
        return sum(plan.agreed.first.send), tokens * getattr(visits, send)

    for travelled, counted in run_simulated(6, rank, topology=UNEQUAL):
        assert travelled == pytest.approx(counted)


@pytest.mark.parametrize("topology,dtype,off", [
    *((topology, torch.float64, 1e-10) for topology in NODES), (NODES[0], torch.bfloat16, 4e-2),
    (UNEQUAL, torch.float32, 2e-5), (UNEQUAL, torch.float16, 5e-3)], ids=str)
def test_any_nodes_and_dtypes(topology: Topology, dtype: torch.dtype, off: float) -> None:
    world = topology.size
    for k, all_to_all, name in ((8, "linear", "ragged"), (2, "leader", "ragged"),
                                (4, "2dh", "ragged"), (4, "leader", "bounded"),
                                (2, "2dh", "bounded")):
        case = case_of(topology, k)
        config = config_of(case, dispatch__send="nodes", comm__all_to_all=all_to_all,
                           parallel__d=k // 2, dispatch__name=name)
        results = run_simulated(world, lambda comm, case=case, config=config: run_rank(
            case, comm, config, dtype), topology=topology)
        with naming(f"{name} k={k}"):
            compare(case, results, reference(case, dtype), rtol=off, atol=off)


def case_of(topology: Topology, k: int) -> Case:
    return Case(topology.size, 2 * topology.size, k, [6, 0, 4, 3, 2, 5][:topology.size], None, None,
                seed=3)


@pytest.mark.parametrize("wire,off", [("bf16", 0.02), ("fp16", 0.003), ("fp8", 0.2),
                                      ("mxfp8", 0.2)])
@pytest.mark.parametrize("send", ["ranks", "nodes"])
@pytest.mark.parametrize("name,topology,d", [("ragged", NODES[0], 2), ("bounded", NODES[0], 1),
                                             ("ragged", UNEQUAL, 1)])
def test_rows_in_a_wire_format(wire: str, off: float, send: str, name: str, topology: Topology,
                               d: int) -> None:
    """Float32 rows rounded on the way, there and back, forward and backward: off by what the format
    rounds, of the norm; and not as exact as without one.
    """
    case = case_of(topology, 4)
    answer, found = reference(case, torch.float32), {}
    for each in (wire, "none"):
        config = config_of(case, dispatch__send=send, comm__wire=each, parallel__d=d,
                           dispatch__name=name)
        found[each] = run_simulated(
            topology.size, lambda comm, config=config: run_rank(case, comm, config, torch.float32),
            topology=topology)
    compare(case, found[wire], answer, of_norm=off)
    for exact in ("output", "input_grad"):
        rounded, plain = (torch.cat([getattr(result, exact) for result in found[each]])
                          for each in (wire, "none"))
        assert float((rounded - plain).norm() / plain.norm()) > 1e-4


def test_one_copy_of_a_token_is_computed_from() -> None:
    """Experts read rows through a map: what arrives is what was sent, R rows and not one for each
    of their experts.
    """
    seen, rows_sent = [], []

    def rank(comm: Comm) -> None:
        layer = MoELayer(from_dict({
            "model_dim": WIDTH, "num_experts": 8, "losses": {}, "router": {"top_k": 4},
            "dispatch": {"send": "ranks"}}), comm)
        layer.experts.register_forward_pre_hook(
            lambda module, args: seen.append((len(args[0].x), args[0].rows.counts.total)))
        rows_sent.append(layer(torch.randn(6, WIDTH)).stats.as_dict()["rows_sent"])

    run_simulated(2, rank)
    assert sum(rows_sent) == sum(arrived for arrived, _ in seen)
    assert sum(computed for _, computed in seen) == 2 * 6 * 4
    assert all(arrived <= 2 * 6 for arrived, _ in seen)


@pytest.mark.parametrize("settings,words", [
    ({"dispatch": {"name": "padded", "capacity_factor": 1.0}}, "dispatch.name='padded'. Use "
     "dispatch.name='ragged' or 'bounded', or dispatch.send='rows'"),
    ({"dispatch": {"name": "all_gather"}}, "dispatch.name='all_gather'. Use"),
    ({"dispatch": {"name": "bounded", "stash_mib": 1.0}}, "dispatch.stash_mib=1.0. Use "
     "dispatch.stash_mib=0, or dispatch.send='rows'"),
    ({"parallel": {"d": 2, "cut": "experts"}}, "parallel.cut='experts'. Use one of"),
    *[({"parallel": {"r": 0, "mode": mode}}, "parallel.r=0, gather_tokens=False. Use a layout in "
       "which rows travel, or dispatch.send='rows'") for mode in ("fixed", "auto", "predicted")],
])
@pytest.mark.parametrize("send", ["ranks", "nodes"])
def test_what_does_not_fit_is_refused_when_a_layer_is_built(send: str, settings: dict,
                                                            words: str) -> None:
    tree = {"model_dim": WIDTH, "num_experts": 4, **settings}
    tree["dispatch"] = {"send": send, **settings.get("dispatch", {})}
    with pytest.raises(ValueError, match=f"dispatch.send='{send}' cannot be combined with {words}"):
        run_simulated(2, lambda comm: MoELayer(from_dict(tree), comm))


# Rows sent once where a choice is made once and used again, or given: recomputed layers, recorded
# routing, even routing, rollouts. Each send gives what rows sent for each choice give.


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
        layer = loaded(CASE, comm, config)
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
