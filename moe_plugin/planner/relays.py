"""Slices of a resharding that cross between nodes once (AlpaComm, arXiv 2211.05322, section 3).

Sent to each of its receivers, a slice crosses to a node as often as it has receivers there. Here a
slice for the g receivers of a node arrives in g parts, one at each, and they exchange the parts on
their node; a further node gets its parts from this one, in chunks, so that all links of the chain
are busy at the same time. On the node of a sender nothing is relayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_plugin.planner.resharding import Slice

CHUNKS = 4  # of a part that goes on to another node


@dataclass(frozen=True)
class Hop:
    """A part of a slice from one device to another.

    Attributes:
        slice: index of the slice.
        part: (start, stop) in the slice's elements, in row-major order.
        depth: 0: the sender stores the slice; d: it has got the part by the hop of depth d - 1.
        chunk: hops of earlier chunks arrive first.
    """

    sender: int
    receiver: int
    slice: int
    part: tuple[int, int]
    depth: int
    chunk: int = 0


def relays(slices: Sequence[Slice], nodes: Sequence[int], chunks: int = CHUNKS) -> list[Hop]:
    """Hops that deliver every element of every slice to each of its receivers once.

    Every device that computes this gets the same list. The largest slices choose first, each the
    senders that have least to send so far. Sorted by chunk, depth, slice, part and receiver: the
    order in which a device handles what it gets.

    Args:
        nodes: by device, the node that it is on.
        chunks: of a part for more than one node.
    """
    load: dict[int, int] = {}
    hops: list[Hop] = []
    for index in sorted(range(len(slices)), key=lambda i: (-slices[i].elements, i)):
        hops += _of_a_slice(index, slices[index], nodes, chunks, load)
    return sorted(hops, key=lambda h: (h.chunk, h.depth, h.slice, h.part, h.receiver))


def _of_a_slice(index: int, each: Slice, nodes: Sequence[int], chunks: int,
                load: dict[int, int]) -> list[Hop]:
    near: dict[int, list[int]] = {}
    for device in each.receivers:
        near.setdefault(nodes[device], []).append(device)
    hops = []
    for node in sorted({nodes[s] for s in each.senders} & set(near)):
        beside = [s for s in each.senders if nodes[s] == node]
        hops += [Hop(_least(beside, each.elements, load), receiver, index, (0, each.elements), 0)
                 for receiver in near.pop(node)]
    if not near:
        return hops
    lanes = max(map(len, near.values()))
    for lane, part in enumerate(_parts((0, each.elements), lanes)):
        sender = _least(each.senders, part[1] - part[0], load)
        for chunk, run in enumerate(_parts(part, chunks if len(near) > 1 else 1)):
            hops += _chain(index, run, chunk, sender, lane, list(near.values()))
    return hops


def _chain(index: int, run: tuple[int, int], chunk: int, sender: int, lane: int,
           by_node: Sequence[Sequence[int]]) -> list[Hop]:
    """One chunk through the nodes, and at each from where it enters to the node's others."""
    hops = []
    for depth, devices in enumerate(by_node):
        entry = devices[lane % len(devices)]
        hops.append(Hop(sender, entry, index, run, depth, chunk))
        hops += [Hop(entry, other, index, run, depth + 1, chunk)
                 for other in devices if other != entry]
        sender = entry
    return hops


def _least(devices: Sequence[int], elements: int, load: dict[int, int]) -> int:
    chosen = min(devices, key=lambda d: (load.get(d, 0), d))
    load[chosen] = load.get(chosen, 0) + elements
    return chosen


def _parts(run: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """At most `count` consecutive parts of a run, none empty, as equal as they can be."""
    start, stop = run
    cuts = [start + (stop - start) * i // count for i in range(count + 1)]
    return [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]
