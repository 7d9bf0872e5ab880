"""Rows sent once: which bytes go from which rank to which, on any nodes, in any dtype; what is
refused. In all layouts: tests/exactness.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Topology, Traffic, run_simulated
from moe_plugin.comm.algorithms import algorithms
from moe_plugin.config import from_dict
from moe_plugin.dispatch.base import DispatchContext
from moe_plugin.dispatch.once import OnceDispatcher
from moe_plugin.dispatch.once_nodes import OnceToNodesDispatcher
from moe_plugin.dispatch.rows_limit import overflowed
from moe_plugin.planner.choice import SENDS
from moe_plugin.records import KeptRouting, Placement, Routing, TokenInfo
from moe_plugin.resilience.overflow import limits_of
from moe_plugin.routing import RouterModule
from moe_plugin.tuning.default_hardware import as_visits, count_visits
from tests.exactness.harness import compare, config_of, naming, reference, run_rank
from tests.oracle import Case

pytestmark = pytest.mark.fast

WIDTH, FLOAT, CODE, COUNT = 8, 8, 2, 8  # bytes of a number of float64, of a pair's code, of a count
UNEQUAL = Topology(((0, 3, 4), (1,), (2, 5)))
NODES = [Topology.uniform(4, 2), Topology.one_node(4), UNEQUAL]


class Fixed(RouterModule):
    """The experts of each token as given; weights are parameters."""

    def __init__(self, ids_TK: Tensor) -> None:
        super().__init__()
        self.ids_TK = ids_TK
        self.weights_TK = nn.Parameter(torch.rand(ids_TK.shape, dtype=torch.float64))

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        return Routing(self.ids_TK, self.weights_TK, torch.zeros(len(x_TD)), {}, torch.zeros(()),
                       torch.tensor(len(x_TD)))


def sent(ids_WTK: list[Tensor], experts: int, send: str, topology: Topology, d: int = 1) -> Traffic:
    """What a call of a layer and its backward pass send, its settings being agreed."""
    world, traffic = len(ids_WTK), Traffic()
    config = from_dict({
        "model_dim": WIDTH, "num_experts": experts, "losses": {}, "parallel": {"d": d, "r": 1},
        "dispatch": {"send": send}, "router": {"top_k": ids_WTK[0].shape[1]}})

    def rank(comm: Comm) -> None:
        router = Fixed(ids_WTK[comm.rank])
        layer = MoELayer(config, comm, router=router, dtype=torch.float64)
        comm.barrier()
        traffic.bytes.clear()
        comm.barrier()
        x = torch.randn(len(router.ids_TK), WIDTH, dtype=torch.float64, requires_grad=True)
        layer(x).output.sum().backward()
        assert router.weights_TK.grad is not None

    run_simulated(world, rank, traffic=traffic, topology=topology)
    return traffic


def by_hand(ids_WTK: list[Tensor], experts: int, send: str, topology: Topology,
            d: int = 1) -> dict[tuple[int, int], int]:
    """The bytes of `sent`, counted token by token."""
    world, sizes = len(ids_WTK), Counter()
    local, nodes = experts // world, topology.nodes
    node_of, place_of = topology.node_of, topology.local_of

    def via(source: int, node: int) -> int:
        return nodes[node][place_of[source] % len(nodes[node])]

    def travel(source: int, target: int, pairs: int) -> None:
        """A row there, its result back, both gradients; pairs there, gradients of weights back."""
        sizes[source, target] += 2 * WIDTH * FLOAT + pairs * (CODE + FLOAT)
        sizes[target, source] += 2 * WIDTH * FLOAT + pairs * FLOAT

    for source, ids_TK in enumerate(ids_WTK):
        for token in ids_TK.tolist():
            pairs = Counter(expert // local for expert in token if expert >= 0)
            if send == "ranks":
                for rank, number in pairs.items():
                    travel(source, rank, number)
                continue
            for node in {node_of[rank] for rank in pairs}:
                peer = via(source, node)
                inside = {rank: n for rank, n in pairs.items() if node_of[rank] == node}
                travel(source, peer, sum(inside.values()))
                for rank, number in inside.items():
                    travel(peer, rank, number)
    table = COUNT * d * (1 + local)
    for source, target in itertools.product(range(world), repeat=2):
        if send == "ranks" or topology.same_node(source, target):
            sizes[source, target] += table
        if send == "nodes" and via(source, node_of[target]) == target:
            sizes[source, target] += COUNT + table * len(topology.peers(target))
    return {pair: size for pair, size in sizes.items() if size and pair[0] != pair[1]}


def drawn(world: int, experts: int, k: int, tokens: list[int]) -> list[Tensor]:
    """Some tokens' experts on each rank; a few choices are none."""
    g = torch.Generator().manual_seed(k)
    found = []
    for rank in range(world):
        ids_TK = torch.rand(tokens[rank % len(tokens)], experts, generator=g).argsort(1)[:, :k]
        found.append(ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=g) < 0.1, -1))
    return found


@pytest.mark.parametrize("send,topology,d", [
    ("ranks", NODES[0], 1), ("ranks", NODES[0], 2), ("nodes", NODES[0], 1), ("nodes", NODES[0], 3),
    ("nodes", UNEQUAL, 1), ("nodes", UNEQUAL, 2)])
def test_bytes_between_every_two_ranks(send: str, topology: Topology, d: int) -> None:
    world = topology.size
    for k in (1, 2, 4, 8):
        ids_WTK = drawn(world, 4 * world, k, [9, 0, 5])
        assert sent(ids_WTK, 4 * world, send, topology, d).bytes == by_hand(
            ids_WTK, 4 * world, send, topology, d), k


@pytest.mark.parametrize("send,targets,topology", [
    ("ranks", 4, NODES[0]), ("nodes", 2, NODES[0]), ("nodes", 4, Topology.uniform(8, 2))])
def test_rows_of_even_routing_are_those_of_the_formula(send: str, targets: int,
                                                       topology: Topology) -> None:
    """Tokens choose every k-tuple of ranks, or nodes, equally often: to others go exactly
    (W - 1) (1 - (1 - 1/W)^k) rows of a token, forward and backward, in each direction.
    """
    world, k = topology.size, 3
    local = 4
    per_target = world // targets * local
    tuples = list(itertools.product(range(targets), repeat=k))
    ids_TK = torch.tensor([[target * per_target + j for j, target in enumerate(choice)]
                           for choice in tuples])
    traffic = sent([ids_TK] * world, world * local, send, topology)
    if send == "ranks":
        crossing = sum(traffic.bytes.values())
        tables = world * (world - 1) * COUNT * (1 + local)
        pairs = world * len(tuples) * k * (1 - 1 / targets)
    else:
        crossing = traffic.between(topology, "bytes")
        per_node = world // targets
        tables = world * (targets - 1) * COUNT * (1 + per_node * (1 + local))
        pairs = world * len(tuples) * k * (1 - 1 / targets)
    rows = (targets - 1) * (1 - (1 - 1 / targets) ** k) * len(tuples) * world
    assert crossing == tables + pairs * (CODE + 2 * FLOAT) + 4 * rows * WIDTH * FLOAT


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


@pytest.mark.parametrize("topology", NODES, ids=str)
@pytest.mark.parametrize("dtype,off", [(torch.float64, 1e-10), (torch.float32, 2e-5),
                                       (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_any_nodes_and_dtypes(topology: Topology, dtype: torch.dtype, off: float) -> None:
    world = topology.size
    for k, all_to_all, wire, name in (
            (8, "linear", "none", "ragged"), (2, "leader", "none", "ragged"),
            (4, "2dh", "bf16", "ragged"), (4, "leader", "none", "bounded"),
            (2, "2dh", "none", "bounded")):
        case = Case(world, 2 * world, k, [6, 0, 4, 3, 2, 5][:world], None, None, seed=3)
        if wire != "none" and dtype not in (torch.bfloat16,):
            wire = "none"
        config = config_of(case, dispatch__send="nodes", comm__all_to_all=all_to_all,
                           comm__wire=wire, parallel__d=k // 2, dispatch__name=name)
        results = run_simulated(world, lambda comm, case=case, config=config: run_rank(
            case, comm, config, dtype), topology=topology)
        with naming(f"{name} k={k}"):
            compare(case, results, reference(case, dtype), rtol=off, atol=off)


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
    ({"dispatch": {"name": "padded", "capacity_factor": 1.0}}, "dispatch.name='padded': use "
     "dispatch.name='ragged' or 'bounded', or dispatch.send='rows'"),
    ({"dispatch": {"name": "all_gather"}}, "dispatch.name='all_gather': use"),
    ({"dispatch": {"name": "bounded", "stash_mib": 1.0}}, "dispatch.stash_mib=1.0: use "
     "dispatch.stash_mib=0, or dispatch.send='rows'"),
    ({"parallel": {"d": 2, "cut": "experts"}}, "parallel.cut='experts': use one of"),
    *[({"parallel": {"r": 0, "mode": mode}}, "parallel.r=0, gather_tokens=False: use a layout in "
       "which rows travel, or dispatch.send='rows'") for mode in ("fixed", "auto", "predicted")],
])
@pytest.mark.parametrize("send", ["ranks", "nodes"])
def test_what_does_not_fit_is_refused_when_a_layer_is_built(send: str, settings: dict,
                                                            words: str) -> None:
    tree = {"model_dim": WIDTH, "num_experts": 4, **settings}
    tree["dispatch"] = {"send": send, **settings.get("dispatch", {})}
    with pytest.raises(ValueError, match=f"dispatch.send='{send}' does not fit {words}"):
        run_simulated(2, lambda comm: MoELayer(from_dict(tree), comm))
