"""Resharding: slices, and who sends them to whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.resharding import TensorLayout, relays, unique_slices


@st.composite
def on_a_mesh(draw: st.DrawFn, shape: tuple[int, ...], first: int) -> TensorLayout:
    """A tensor on a random mesh with a random spec."""
    mesh = {name: draw(st.integers(1, 3)) for name in "ab"}
    spec: list[list[str]] = [[] for _ in shape]
    for name in draw(st.permutations(list(mesh))):
        if draw(st.booleans()):
            spec[draw(st.integers(0, len(shape) - 1))].append(name)
    count = mesh["a"] * mesh["b"]
    devices = draw(st.permutations(range(first, first + count)))
    return TensorLayout.on_mesh(shape, mesh, spec, devices)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[TensorLayout, TensorLayout]:
    """Two layouts of one tensor, on the same, on other or on partly the same devices."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    return draw(on_a_mesh(shape, 0)), draw(on_a_mesh(shape, draw(st.sampled_from([0, 2, 100]))))


def box_of(x: torch.Tensor, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return x[tuple(slice(*run) for run in box)]


@settings(max_examples=150, deadline=None)
@given(pairs(), st.integers(1, 3), st.integers(1, 3))
def test_every_slice_arrives_once_and_the_tensor_is_whole(
        pair: tuple[TensorLayout, TensorLayout], per_node: int, chunks: int) -> None:
    source, target = pair
    whole = torch.arange(1, 1 + torch.Size(source.shape).numel()).view(source.shape)
    stored = {device: box_of(whole, box) for device, box in source.boxes.items()}
    made = {d: torch.zeros([b - a for a, b in box], dtype=torch.int64)
            for d, box in target.boxes.items()}
    slices = unique_slices(source, target)
    for each in slices:
        for device in each.keepers:
            box = source.boxes[device]
            made[device][each.within(target.boxes[device])] += stored[device][each.within(box)]
    hops = relays(slices, [device // per_node for device in range(110)], chunks)
    for hop in sorted(hops, key=lambda hop: hop.depth):
        each = slices[hop.slice]
        held = made if hop.depth else stored
        box = (target if hop.depth else source).boxes[hop.sender]
        part = torch.zeros(each.elements, dtype=torch.int64)
        part[slice(*hop.part)] = held[hop.sender][each.within(box)].flatten()[slice(*hop.part)]
        # added: what arrives twice, or before its relay has it, is wrong
        made[hop.receiver][each.within(target.boxes[hop.receiver])] += part.view(
            [stop - start for start, stop in each.box])
    for device, box in target.boxes.items():
        assert torch.equal(made[device], box_of(whole, box))
    assert all(s.senders and not {*s.receivers} & {*s.senders} for s in slices)


def test_replicas_share_the_sending() -> None:
    """Two replicas of four experts, and two more devices that need all of them: two experts are
    sent by each replica to each.
    """
    source = TensorLayout((4,), {0: ((0, 4),), 1: ((0, 4),)})
    parts = TensorLayout((4,), {d: ((d % 4, d % 4 + 1),) for d in range(2, 6)})
    sent = relays(unique_slices(source, parts), range(6))
    assert sorted(hop.sender for hop in sent) == [0, 0, 1, 1]
    assert [hop.receiver for hop in sent] == [4, 5, 2, 3]


def test_what_is_stored_nowhere_is_named() -> None:
    half = TensorLayout((4,), {0: ((0, 2),)})
    with pytest.raises(ValueError, match=r"no device stores \(\(2, 4\),\)"):
        unique_slices(half, TensorLayout((4,), {1: ((0, 4),)}))
    with pytest.raises(ValueError, match="must be equal"):
        unique_slices(half, TensorLayout((3,), {1: ((0, 3),)}))
    with pytest.raises(ValueError, match="not inside"):
        TensorLayout((4,), {0: ((0, 5),)})
    with pytest.raises(ValueError, match="must list axes"):
        TensorLayout.on_mesh((4,), {"a": 2}, [["b"]])
    with pytest.raises(ValueError, match="devices, got"):
        TensorLayout.on_mesh((4,), {"a": 2}, [["a"]], [0])
