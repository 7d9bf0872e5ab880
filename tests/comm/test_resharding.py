"""Tensors between layouts of ranks: every rank has what gathering and cutting would give it."""

from __future__ import annotations

import random

import pytest
import torch

from moe_plugin.comm import Comm, TorchComm
from moe_plugin.comm.resharding import Resharding
from moe_plugin.comm.simulated import run_simulated
from moe_plugin.planner.resharding import TensorLayout, relays, unique_slices
from tests.distributed import run_gloo

WORLD = 6


def pair(seed: int, shared: bool) -> tuple[TensorLayout, TensorLayout]:
    """Two random layouts of a tensor: on three ranks each, or on all ranks."""
    dice = random.Random(seed)
    shape = [dice.randint(1, 7) for _ in range(3)]

    def on(ranks: range) -> TensorLayout:
        mesh = {"a": dice.choice([1, 3]), "b": 1}
        mesh["b"] = len(ranks) // mesh["a"]
        spec: list[list[str]] = [[], [], []]
        for name in "ab":
            if dice.random() < 0.6:
                spec[dice.randrange(3)].append(name)
        return TensorLayout.on_mesh(shape, mesh, spec, dice.sample(ranks, len(ranks)))

    return (on(range(6)), on(range(6))) if shared else (on(range(3)), on(range(3, 6)))


NODES = ([0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [0, 0, 1, 1, 2, 2], list(range(6)))
CASES = [(seed, shared, nodes) for seed in range(5) for shared in (False, True) for nodes in NODES]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("seed,shared,nodes", CASES)
def test_every_element_arrives_once(seed: int, shared: bool, nodes: list[int], chunks: int) -> None:
    slices = unique_slices(*pair(seed, shared))
    got = {(r, i): [0] * each.elements for i, each in enumerate(slices) for r in each.receivers}
    for hop in sorted(relays(slices, nodes, chunks), key=lambda h: h.depth):
        part = range(*hop.part)
        if hop.depth:
            assert all(got[hop.sender, hop.slice][e] for e in part)  # it has arrived before
        else:
            assert hop.sender in slices[hop.slice].senders
        for element in part:
            got[hop.receiver, hop.slice][element] += 1
    assert all(set(counts) == {1} for counts in got.values())


def test_a_slice_crosses_to_a_node_once() -> None:
    """One rank of node 0 has it all; both ranks of nodes 1 and 2 need it."""
    source = TensorLayout((8,), {0: ((0, 8),)})
    target = TensorLayout((8,), {rank: ((0, 8),) for rank in (2, 3, 4, 5)})
    hops = relays(unique_slices(source, target), [0, 0, 1, 1, 2, 2], chunks=2)
    nodes = [0, 0, 1, 1, 2, 2]
    for node in (1, 2):
        entering = [e for h in hops if nodes[h.sender] != nodes[h.receiver] == node
                    for e in range(*h.part)]
        assert sorted(entering) == list(range(8))


def check(comm: Comm) -> list[str]:
    """Cases that go wrong, in every order of begun and ended moves that is allowed."""
    wrong = []
    for seed, shared, nodes in CASES:
        source, target = pair(seed, shared)
        whole = torch.arange(float(torch.Size(source.shape).numel())).view(source.shape)

        def mine(x: torch.Tensor, layout: TensorLayout, rank: int) -> torch.Tensor | None:
            box = layout.boxes.get(rank)
            return None if box is None else x[tuple(slice(*run) for run in box)]

        plan = Resharding(comm, source, target, nodes)
        scales = (1.0, -2.0)
        moves = [plan.start(mine(whole * scale, source, comm.rank), torch.float32)
                 for scale in scales]
        for move, scale in zip(moves, scales, strict=True):
            got, wanted = move.end(), mine(whole * scale, target, comm.rank)
            if (got is None) != (wanted is None) or (got is not None and not got.equal(wanted)):
                wrong.append(f"{seed} {shared} {nodes} {scale}")
    return wrong


def test_simulated_ranks_have_what_they_need() -> None:
    assert run_simulated(WORLD, check) == [[]] * WORLD


def _on_gloo() -> tuple[list[str], str]:
    comm = TorchComm()
    wrong = check(comm)
    plan = Resharding(comm, *pair(0, False))
    try:
        plan.start(torch.zeros(1), torch.float32)
        return wrong, ""
    except ValueError as error:
        return wrong, str(error)


@pytest.mark.distributed
def test_ranks_have_what_they_need() -> None:
    for rank, (wrong, said) in enumerate(run_gloo(WORLD, _on_gloo)):
        assert wrong == [] and f"rank {rank} must pass its part of the source layout" in said
