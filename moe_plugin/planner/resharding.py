"""What must move where a tensor goes from one layout to another (AlpaComm, arXiv 2211.05322).

A layout says which box of a tensor each device stores. The boundaries of all boxes of both layouts
cut the tensor into unique slices: a device stores a slice entirely or not at all. Each slice is one
multicast from any of the devices that store it before to all that store it after and did not
before. Devices may have a part in both layouts, as where the number of expert-parallel ranks
changes; what a device has already, it is not sent.

A slice crosses to a node once (section 3): for the g receivers of a node it arrives in g parts, one
at each, and they exchange the parts on their node; a further node gets its parts from this one, in
chunks, so that all links of the chain are busy at the same time. On the node of a sender nothing is
relayed.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CHUNKS = 4  # of a part that goes on to another node
Box = tuple[tuple[int, int], ...]  # (start, stop) along each axis of the tensor


@dataclass(frozen=True)
class TensorLayout:
    """Which box of a tensor each device stores.

    Attributes:
        shape: of the tensor.
        boxes: by device; several devices may store the same elements.
    """

    shape: tuple[int, ...]
    boxes: Mapping[int, Box]

    def __post_init__(self) -> None:
        for device, box in self.boxes.items():
            inside = len(box) == len(self.shape) and all(
                0 <= start <= stop <= size
                for (start, stop), size in zip(box, self.shape, strict=True))
            if not inside:
                raise ValueError(f"box {box} of device {device} is not inside a tensor of shape "
                                 f"{self.shape}; give (start, stop) for each of its axes")

    @classmethod
    def on_mesh(cls, shape: Sequence[int], mesh: Mapping[str, int],
                spec: Sequence[Sequence[str]],
                devices: Sequence[int] | None = None) -> TensorLayout:
        """A tensor cut over a mesh of devices, as Alpa and JAX write it.

        Parts of an axis differ by one element at most where they are not equal.

        Args:
            mesh: sizes of the mesh by the names of its axes, the slowest first.
            spec: for every axis of the tensor, the mesh axes over which it is cut; over the others
                it is copied.
            devices: in the order of the mesh; None: 0, 1, 2, ...
        Raises: ValueError: axes that the mesh lacks or that are used twice; another number of
            devices.
        """
        count = math.prod(mesh.values())
        devices = range(count) if devices is None else devices
        used = [name for names in spec for name in names]
        if len(spec) != len(shape) or set(used) - set(mesh) or len(set(used)) < len(used):
            raise ValueError(
                f"spec {[list(names) for names in spec]} must name axes of the mesh {dict(mesh)}, "
                f"each once at most, for each of the {len(shape)} axes of the tensor")
        if len(devices) != count:
            raise ValueError(f"{len(devices)} devices do not fit a mesh of {count}: give as many")
        boxes = {}
        places = itertools.product(*(range(size) for size in mesh.values()))
        for device, place in zip(devices, places, strict=True):
            at = dict(zip(mesh, place, strict=True))
            boxes[device] = tuple(_part(size, names, at, mesh)
                                  for size, names in zip(shape, spec, strict=True))
        return cls(tuple(shape), boxes)


def _part(size: int, names: Sequence[str], at: Mapping[str, int],
          mesh: Mapping[str, int]) -> tuple[int, int]:
    index, parts = 0, 1
    for name in names:
        index, parts = index * mesh[name] + at[name], parts * mesh[name]
    return index * size // parts, (index + 1) * size // parts


@dataclass(frozen=True)
class Slice:
    """A unique slice: one multicast.

    Attributes:
        box: in the tensor.
        senders: devices that store it before.
        receivers: devices that need it and do not have it yet.
        keepers: devices that store it before and after. All ascending.
    """

    box: Box
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    keepers: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements of the slice."""
        return math.prod(stop - start for start, stop in self.box)

    def within(self, box: Box) -> tuple[slice, ...]:
        """Where the slice is in the part of a tensor that a device stores; box: of that device."""
        return tuple(slice(start - first, stop - first)
                     for (start, stop), (first, _) in zip(self.box, box, strict=True))


def unique_slices(source: TensorLayout, target: TensorLayout) -> list[Slice]:
    """All slices that any device needs, in the order of their boxes.

    Raises: ValueError: the shapes differ, or a needed slice is stored nowhere.
    """
    if source.shape != target.shape:
        raise ValueError(f"layouts of shapes {source.shape} and {target.shape} are not of one "
                         "tensor: must be equal")
    sides = [_by_box(source), _by_box(target)]
    cuts = [sorted({0, size, *(end for side in sides for box in side for end in box[axis])})
            for axis, size in enumerate(source.shape)]
    stored, needed = (_cells(side, cuts) for side in sides)
    made = []
    for cell in sorted(needed):
        box = tuple((cut[i], cut[i + 1]) for cut, i in zip(cuts, cell, strict=True))
        senders, wanted = stored.get(cell, []), needed[cell]
        if not senders:
            raise ValueError(f"no device stores {box} of a tensor of shape {source.shape}, which "
                             f"devices {wanted} need; the source layout must have all of it")
        made.append(Slice(box, tuple(sorted(senders)), tuple(sorted({*wanted} - {*senders})),
                          tuple(sorted({*wanted} & {*senders}))))
    return made


def _by_box(layout: TensorLayout) -> dict[Box, list[int]]:
    devices: dict[Box, list[int]] = {}
    for device, box in layout.boxes.items():
        devices.setdefault(box, []).append(device)
    return devices


def _cells(side: Mapping[Box, list[int]], cuts: Sequence[list[int]]
           ) -> dict[tuple[int, ...], list[int]]:
    """Devices by the slices, counted along each axis, that they store."""
    found: dict[tuple[int, ...], list[int]] = {}
    for box, devices in side.items():
        runs = [range(bisect_left(cut, start), bisect_left(cut, stop))
                for cut, (start, stop) in zip(cuts, box, strict=True)]
        for cell in itertools.product(*runs):
            found.setdefault(cell, []).extend(devices)
    return found


# -- hops between devices


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
        same_node = [s for s in each.senders if nodes[s] == node]
        hops += [Hop(_least(same_node, each.elements, load), receiver, index, (0, each.elements), 0)
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
