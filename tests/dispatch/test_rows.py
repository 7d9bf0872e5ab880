"""Which choice lies in which row, and how rows are cut into pieces."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_plugin.comm import Comm, LocalComm, algorithms, run_simulated
from moe_plugin.comm.placement import Placement
from moe_plugin.config import from_dict
from moe_plugin.config.parallel import CUTS as NAMES
from moe_plugin.dispatch.base import expand, expand_slots
from moe_plugin.dispatch.pieces import PIECE_AXES, Counts, PieceShares, shares_along
from moe_plugin.dispatch.rows import (
    exact_rows,
    inverse_permutation,
    rows_of_this_rank,
    slot_rows,
    sort_by_expert,
)
from moe_plugin.kernels import slot_index, weigh_rows
from moe_plugin.kernels.choices import stable_order
from moe_plugin.layer import MoELayer
from moe_plugin.records import Routing
from tests.seeds import seeded

pytestmark = pytest.mark.fast


# Which choice lies in which row, against loops.


EXPERTS = 4
IDS = st.lists(st.lists(st.integers(-1, EXPERTS - 1), min_size=2, max_size=2), max_size=9)


def ids_of(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2)


def routing_of(ids_TK: Tensor) -> Routing:
    """A routing with these ids; the rest plays no part here."""
    scalar = torch.zeros(())
    return Routing(ids_TK=ids_TK, weights_TK=torch.rand(ids_TK.shape), priority_T=scalar,
                   losses={}, entropy=scalar, tokens=scalar)


@given(rows=IDS)
@settings(deadline=None, max_examples=60)
def test_exact_rows(rows: list[list[int]]) -> None:
    ids_TK = ids_of(rows)
    plan = exact_rows(ids_TK, torch.rand(ids_TK.shape), EXPERTS)
    flat = ids_TK.flatten().tolist()
    wanted = [n for e in range(EXPERTS) for n, expert in enumerate(flat) if expert == e]
    assert plan.source_R.tolist() == wanted and plan.token_R.tolist() == [n // 2 for n in wanted]
    assert plan.counts.host == [flat.count(e) for e in range(EXPERTS)]
    assert plan.position_TK.flatten().tolist() == [
        wanted.index(n) if expert >= 0 else -1 for n, expert in enumerate(flat)
    ]


@given(rows=IDS, capacity=st.integers(9, 12))
@settings(deadline=None, max_examples=60)
def test_fixed_slots(rows: list[list[int]], capacity: int) -> None:
    ids_TK = ids_of(rows)
    slots_TK = slot_index(ids_TK, EXPERTS)
    if slots_TK.numel() and int(slots_TK.max()) >= capacity:
        return  # capacity drops such choices before rows are planned
    plan = slot_rows(ids_TK, torch.rand(ids_TK.shape), slots_TK, capacity, EXPERTS)
    wanted = [-1] * (EXPERTS * capacity)
    for n, (expert, slot) in enumerate(zip(ids_TK.flatten().tolist(), slots_TK.flatten().tolist(),
                                           strict=True)):
        if expert >= 0:
            wanted[expert * capacity + slot] = n
    assert plan.source_R.tolist() == wanted and plan.counts.host == [capacity] * EXPERTS


@given(rows=IDS)
@settings(deadline=None, max_examples=30)
def test_weighed_rows_and_their_derivatives(rows: list[list[int]]) -> None:
    ids_TK = ids_of(rows)
    g = torch.Generator().manual_seed(len(rows))
    x_TD = torch.randn(len(ids_TK), 3, generator=g, dtype=torch.float64, requires_grad=True)
    weights_TK = torch.rand(ids_TK.shape, generator=g, dtype=torch.float64, requires_grad=True)
    plan = exact_rows(ids_TK, weights_TK, EXPERTS)

    def weighed(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        return weigh_rows(x_TD, weights_TK, plan.source_R, plan.position_TK)

    wanted = [weights_TK.flatten()[n] * x_TD[n // 2] for n in plan.source_R.tolist()]
    torch.testing.assert_close(weighed(x_TD, weights_TK),
                               torch.stack(wanted) if wanted else x_TD.new_zeros(0, 3))
    if wanted:
        assert torch.autograd.gradcheck(weighed, (x_TD, weights_TK))
        assert torch.autograd.gradgradcheck(weighed, (x_TD, weights_TK))


def test_choices_without_an_expert_come_last() -> None:
    order_N, counts_E = sort_by_expert(torch.tensor([[2, -1], [0, 2], [-1, 1]]), EXPERTS)
    assert order_N.tolist() == [2, 5, 0, 3, 1, 4] and counts_E.tolist() == [1, 1, 2, 0]


@pytest.mark.parametrize("below", [2, 1 << 15, (1 << 15) + 1])
@pytest.mark.parametrize("number", [0, 1, 700])
def test_choices_of_an_expert_keep_their_order(below: int, number: int) -> None:
    """However many experts there are: up to 32,768 they are sorted as 16-bit numbers."""
    key_N = torch.randint(max(0, below - 3), below, (number,))
    key_N[::3] = torch.randint(0, below, (len(key_N[::3]),))
    want = sorted(range(number), key=key_N.tolist().__getitem__)
    assert stable_order(key_N, below).tolist() == want
    assert torch.equal(stable_order(key_N[::2], below), torch.argsort(key_N[::2], stable=True))


def test_inverse_permutation() -> None:
    order_R = torch.randperm(17)
    assert torch.equal(inverse_permutation(order_R)[order_R], torch.arange(17))


def test_every_choice_is_a_row_of_one_rank() -> None:
    """Where experts are cut, of every rank that has a shard of the expert."""
    ids_TK = torch.tensor([[0, 3], [1, -1], [2, 0], [3, 1]])
    for world, experts, owners in [(2, 4, 1), (4, 4, 1), (8, 4, 2)]:
        found = run_simulated(world, lambda comm, experts=experts: rows_of_this_rank(
            routing_of(ids_TK), Placement(comm, experts, algorithms.get("linear"))))
        rows = sorted(n for plan in found for n in plan.source_R.tolist())
        assert rows == sorted([0, 1, 2, 4, 5, 6, 7] * owners), world


def test_slices_of_a_cut_expert_share_out_its_slots() -> None:
    """Two experts on eight ranks, every token to r = 2 of the S = 4 shards: slot s goes to member
    s % 2 of each slice.
    """
    ids_TK, slots_TK = torch.tensor([[0], [0], [1], [0]]), torch.tensor([[0], [1], [0], [2]])
    place = run_simulated(8, lambda comm: Placement(comm, 2, algorithms.get("linear"), copies=2))[0]
    ids_TKr, weights_TKr = expand(place, routing_of(ids_TK[:, :1]), slots_TK)
    assert ids_TKr.tolist() == [[0, 2], [1, 3], [4, 6], [0, 2]] and weights_TKr.shape == (4, 2)
    spread_TKr, capacity = expand_slots(place, slots_TK, 3)
    assert spread_TKr.tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]] and capacity == 2


def test_whole_experts_are_not_expanded() -> None:
    routing = routing_of(torch.tensor([[0, 1]]))
    ids_TK, weights_TK = expand(Placement(LocalComm(), 2, algorithms.get("linear")), routing, None)
    assert ids_TK is routing.ids_TK and weights_TK is routing.weights_TK


class _Copies(TorchDispatchMode):
    """Names of the operations that give rows [R, D] by an index, or in another order of axes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.index_select, torch.ops.aten.index,
                                   torch.ops.aten.gather) and made.dim() == 2:
            if func is not torch.ops.aten.index_select.out:  # into a buffer that stays in the cache
                self.found.append((str(func), made.shape[0]))
        elif func.overloadpacket is torch.ops.aten.clone and made.dim() > 1:
            self.found.append((str(func), made.numel() // made.shape[-1]))
        return made


@pytest.mark.parametrize("name", ["ragged", "bounded", "padded"])
def test_rows_that_arrived_are_not_copied_into_the_order_of_experts(name: str) -> None:
    """Neither forward nor backward, of inputs or results: the experts' own operation does it."""
    def rank(comm: Comm) -> tuple[list[tuple[str, int]], int]:
        factor = 2.0 if name == "padded" else None
        with seeded(comm.rank):
            layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "parallel": "fixed",
                                        "dispatch": {"name": name, "capacity_factor": factor},
                                        "experts": {"compute": "fused"}}), comm)
            x_TD = torch.randn(30 + comm.rank, 8, requires_grad=True)
        y_TD = layer(x_TD).output
        with _Copies() as copies:
            out = layer(x_TD)
            out.output.sum().backward()
        assert torch.equal(out.output, y_TD)
        # rows that are sent are taken from the tokens, and gradients of results: under a bound, and
        # with slots, there are as many of them, else only where a rank happens to get as many
        rows = {"ragged": int(out.stats.rows), "bounded": 2 * 31 * 2, "padded": 4 * 32}[name]
        sent = 2 if name != "ragged" or rows == 2 * x_TD.shape[0] else 0
        return [each for each in copies.found if each[1] == rows], sent

    for found, sent in run_simulated(2, rank):
        assert len(found) == sent, found


# Cuts of rows into pieces: sender and receiver agree, nothing is lost, each rule does what it
# says.


SIZES = [(1, 1, 1), (1, 2, 3), (2, 2, 4), (4, 4, 3), (3, 4, 2), (5, 3, 7), (8, 2, 1), (6, 8, 4)]


def _both_sides(shares: PieceShares, ranks: int, local: int, seed: int) -> list[list[list[Counts]]]:
    """[sent, received][rank][piece] of random counts."""
    dice = random.Random(seed)
    rows = [[[dice.choice([0, 1, 5, 37]) for _ in range(local)] for _ in range(ranks)]
            for _ in range(ranks)]
    sent = [shares.parts(rows[rank], rank, True) for rank in range(ranks)]
    received = [shares.parts([rows[source][rank] for source in range(ranks)], rank, False)
                for rank in range(ranks)]
    for rank in range(ranks):  # nothing is lost
        total = [[sum(column) for column in zip(*lists, strict=True)]
                 for lists in zip(*sent[rank], strict=True)]
        assert total == rows[rank]
    return [sent, received]


def test_the_names_are_those_of_the_settings() -> None:
    assert tuple(PIECE_AXES) == NAMES


@pytest.mark.parametrize("name", PIECE_AXES)
@pytest.mark.parametrize("number,ranks,local", SIZES)
def test_sender_and_receiver_agree(name: str, number: int, ranks: int, local: int) -> None:
    shares = shares_along(name, number, ranks, local)
    sent, received = _both_sides(shares, ranks, local, number)
    for piece in range(shares.pieces):
        for source in range(ranks):
            for target in range(ranks):
                assert sent[source][piece][target] == received[target][piece][source]
    for piece in shares.local:
        for rank in range(ranks):
            assert not any(any(row) for other, row in enumerate(sent[rank][piece]) if other != rank)


def test_by_rows_every_piece_has_some_of_each_expert() -> None:
    assert shares_along("rows", 3, 2, 2).parts([[7, 3], [9, 0]], 0, True) == [
        [[2, 1], [3, 0]], [[2, 1], [3, 0]], [[3, 1], [3, 0]]]


def test_by_experts_a_piece_has_few_experts_with_all_their_rows() -> None:
    assert shares_along("experts", 2, 2, 4).parts([[1, 2, 3, 4], [5, 6, 7, 8]], 0, True) == [
        [[1, 2, 0, 0], [5, 6, 0, 0]], [[0, 0, 3, 4], [0, 0, 7, 8]]]
    # more pieces than experts: an expert's rows are shared out
    assert shares_along("experts", 4, 1, 2).parts([[5, 8]], 0, True) == [
        [[2, 0]], [[3, 0]], [[0, 4]], [[0, 4]]]


def test_by_peers_what_stays_is_first_and_last() -> None:
    """Rank 1 of 3: 4 rows stay, then those for rank 2, then those for rank 0."""
    shares = shares_along("peers", 2, 3, 1)
    assert shares.local == (0, 3)
    assert shares.parts([[5], [4], [7]], 1, True) == [
        [[0], [2], [0]], [[0], [0], [7]], [[5], [0], [0]], [[0], [2], [0]]]
    # two peers in four pieces: half of a peer's rows in each
    assert shares_along("peers", 4, 3, 1).parts([[5], [4], [7]], 1, True)[1:5] == [
        [[0], [0], [3]], [[0], [0], [4]], [[2], [0], [0]], [[3], [0], [0]]]
