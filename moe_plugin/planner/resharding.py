"""Data movement that changes the layout of a tensor (AlpaComm, arXiv 2211.05322).

A layout defines which box (rectangular part) of a tensor each device stores. The boundaries of all
boxes of both layouts divide the tensor into unique slices. A device stores a slice either entirely
or not at all. Each slice is multicast from any device that stores it in the old layout to all
devices that store it only in the new layout. Devices may be part of both layouts, for example if
the number of expert-parallel ranks changes. Data is not sent to devices that already have it.

A slice is sent to each node only once (section 3). If g devices of a node need a slice, each of
them receives one of g parts, and they exchange the parts inside the node. Further nodes receive
their parts from this node in chunks, so all links of this chain of nodes are busy at the same time.
Devices on the sender's own node receive the slice directly from the sender.

A node sends one slice at a time and receives one slice at a time. The sender of each slice and the
order of the slices are searched by randomized greedy rounds and, if there are few slices, by a
depth-first search with pruning (section 4, `best_order`). `relays` uses this result if it is faster
than a simple plan. In the simple plan, the largest slices are sent first, each from the device with
the least data to send."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_plugin.planner.events import Task, simulate

CHUNKS = 4  # chunks of a part that is forwarded to another node
ROUNDS = 100  # rounds of the randomized greedy search
SEARCHED, STEPS = 8, 20_000  # largest number of slices for the depth-first search, and its steps
Box = tuple[tuple[int, int], ...]  # (start, stop) along each axis of the tensor


@dataclass(frozen=True)
class TensorLayout:
    """Layout of a tensor. The layout defines the box of the tensor that each device stores.

    Attributes:
        shape: shape of the tensor.
        boxes: box that each device stores. Several devices may store the same elements.
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
                                 f"{self.shape}. Specify (start, stop) for each axis")

    @classmethod
    def on_mesh(cls, shape: Sequence[int], mesh: Mapping[str, int],
                spec: Sequence[Sequence[str]],
                devices: Sequence[int] | None = None) -> TensorLayout:
        """Return the layout of a tensor that is sharded over a device mesh, as in Alpa and JAX.

        If an axis cannot be divided evenly, the lengths of its parts differ by at most one element.

        Args:
            shape: shape of the tensor.
            mesh: mapping from the name of each mesh axis to its size, with the slowest axis first.
            spec: for every axis of the tensor, the mesh axes over which it is sharded. The tensor
                is replicated over all remaining mesh axes.
            devices: devices in the order of the mesh. Defaults to 0, 1, 2 and so on.
        Raises: ValueError: If mesh axes are unknown or used twice, or if the device count is
            wrong."""
        count = math.prod(mesh.values())
        devices = range(count) if devices is None else devices
        used = [name for names in spec for name in names]
        if len(spec) != len(shape) or set(used) - set(mesh) or len(set(used)) < len(used):
            raise ValueError(
                f"spec {[list(names) for names in spec]} must name axes of the mesh {dict(mesh)}, "
                f"each at most once, for each of the {len(shape)} axes of the tensor")
        if len(devices) != count:
            raise ValueError(f"a mesh of {count} devices needs {count} devices, got {len(devices)}")
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
    """A unique slice, which is sent as one multicast. All lists of devices are in ascending order.

    Attributes:
        box: position of the slice in the tensor.
        senders: devices that store the slice in the old layout.
        receivers: devices that store the slice only in the new layout.
        keepers: devices that store the slice in both layouts.
    """

    box: Box
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    keepers: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements of the slice."""
        return math.prod(stop - start for start, stop in self.box)

    def within(self, box: Box) -> tuple[slice, ...]:
        """Return the slice's position relative to the part of the tensor that is in `box`."""
        return tuple(slice(start - first, stop - first)
                     for (start, stop), (first, _) in zip(self.box, box, strict=True))


def unique_slices(source: TensorLayout, target: TensorLayout) -> list[Slice]:
    """Return all slices that any device needs in the new layout, in the order of their boxes.

    Raises: ValueError: If the shapes differ, or if no device stores a needed slice.
    """
    if source.shape != target.shape:
        raise ValueError(f"layouts of shapes {source.shape} and {target.shape} do not describe the "
                         "same tensor; the shapes must be equal")
    sides = [_by_box(source), _by_box(target)]
    cuts = [sorted({0, size, *(end for side in sides for box in side for end in box[axis])})
            for axis, size in enumerate(source.shape)]
    stored, needed = (_cells(side, cuts) for side in sides)
    slices = []
    for cell in sorted(needed):
        box = tuple((cut[i], cut[i + 1]) for cut, i in zip(cuts, cell, strict=True))
        senders, wanted = stored.get(cell, []), needed[cell]
        if not senders:
            raise ValueError(f"no device stores {box} of a tensor of shape {source.shape}, but "
                             f"devices {wanted} need it. The source layout must be complete")
        slices.append(Slice(box, tuple(sorted(senders)), tuple(sorted({*wanted} - {*senders})),
                            tuple(sorted({*wanted} & {*senders}))))
    return slices


def _by_box(layout: TensorLayout) -> dict[Box, list[int]]:
    devices: dict[Box, list[int]] = {}
    for device, box in layout.boxes.items():
        devices.setdefault(box, []).append(device)
    return devices


def _cells(side: Mapping[Box, list[int]], cuts: Sequence[list[int]]
           ) -> dict[tuple[int, ...], list[int]]:
    """Return the devices that store each slice, keyed by the slice's indices along all axes."""
    cells: dict[tuple[int, ...], list[int]] = {}
    for box, devices in side.items():
        runs = [range(bisect_left(cut, start), bisect_left(cut, stop))
                for cut, (start, stop) in zip(cuts, box, strict=True)]
        for cell in itertools.product(*runs):
            cells.setdefault(cell, []).extend(devices)
    return cells


# Hops between devices.


@dataclass(frozen=True)
class Hop:
    """A transfer of a part of a slice from one device to another.

    Attributes:
        slice: index of the slice to which the part belongs.
        part: range (start, stop) of the slice's elements in row-major order.
        depth: 0 if the sender stores the slice, otherwise 1 more than that of the hop to the
            sender.
        chunk: index of the chunk of the part. Transfers of earlier chunks arrive first.
    """

    sender: int
    receiver: int
    slice: int
    part: tuple[int, int]
    depth: int
    chunk: int = 0


def relays(slices: Sequence[Slice], nodes: Sequence[int], chunks: int = CHUNKS) -> list[Hop]:
    """Return hops that deliver every element of every slice to each receiver exactly once.

    All devices compute the same list. The faster of two plans, according to `hops_s`, is returned.
    In the first plan, the largest slices are sent first, each by the device that has the least data
    to send so far. The second plan follows `best_order`. The hops are sorted by chunk, depth, order
    of slices, part and receiver, which is the order in which devices process the received data.

    Args:
        nodes: index of the node of each device.
        chunks: number of chunks into which a part is split if several nodes receive it.
    """
    largest = sorted(range(len(slices)), key=lambda i: (-slices[i].elements, i))
    plain = _in_order(slices, nodes, chunks, [(i, None) for i in largest])
    order = best_order(slices, nodes, chunks).steps
    if not order:
        return plain
    searched = {index for index, _ in order}
    rest = [(i, None) for i in largest if i not in searched]
    searched_hops = _in_order(slices, nodes, chunks, [*order, *rest])
    return min(plain, searched_hops, key=lambda hops: hops_s(hops, nodes))


def _in_order(slices: Sequence[Slice], nodes: Sequence[int], chunks: int,
              order: Sequence[tuple[int, int | None]]) -> list[Hop]:
    load: dict[int, int] = {}
    place = {index: number for number, (index, _) in enumerate(order)}
    hops = [hop for index, home in order
            for hop in _of_a_slice(index, slices[index], nodes, chunks, load, home)]
    return sorted(hops, key=lambda h: (h.chunk, h.depth, place[h.slice], h.part, h.receiver))


def hops_s(hops: Sequence[Hop], nodes: Sequence[int]) -> float:
    """Return the simulated time of hops in units of one element over one link.

    A node sends one hop at a time and receives one hop at a time. Transfers inside a node are
    assumed to take no time."""
    tasks: list[Task] = []
    last: dict[tuple[int, tuple[int, int], int], str] = {}  # hop that brought a part to a device
    for number, hop in enumerate(hops):
        before = last.get((hop.slice, hop.part, hop.sender)) if hop.depth else None
        ends, name = (nodes[hop.sender], nodes[hop.receiver]), f"hop {number}"
        after = () if before is None else (before,)
        if ends[0] == ends[1]:
            tasks.append(Task(name, name, 0.0, after))
        else:
            tasks.append(Task(name, f"out {ends[0]}", float(hop.part[1] - hop.part[0]), after,
                              also=(f"in {ends[1]}",)))
        last[hop.slice, hop.part, hop.receiver] = name
    return simulate(tasks).seconds


# Order of slices.


@dataclass(frozen=True)
class SliceOrder:
    """Result of `best_order`.

    Attributes:
        steps: pairs (slice, sending node) in order, for slices that leave a node.
        seconds: time until the last slice has arrived, in units of one element over one link.
    """

    steps: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(frozen=True)
class _Crossing:
    """A slice that is sent from one of the nodes `senders` to all nodes `receivers`."""

    index: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    seconds: float


def _crossings(slices: Sequence[Slice], nodes: Sequence[int], chunks: int) -> list[_Crossing]:
    crossings = []
    for index, piece in enumerate(slices):
        senders = tuple(sorted({nodes[device] for device in piece.senders}))
        receivers = tuple(sorted({nodes[device] for device in piece.receivers} - {*senders}))
        if receivers:  # in a chain of nodes, each node receives its first chunk later
            late = 1 + (len(receivers) - 1) / chunks
            crossings.append(_Crossing(index, senders, receivers, piece.elements * late))
    return crossings


def best_order(slices: Sequence[Slice], nodes: Sequence[int], chunks: int = CHUNKS,
               rounds: int = ROUNDS) -> SliceOrder:
    """Return a sender for each slice and a fast order. Both are the same on all devices.

    The result is the best of `rounds` randomized greedy orders. In each round, a maximal set of
    slices that use different nodes is sent, each from the sender with the least data to send. With
    up to 8 slices, a depth-first search with pruning starts from this order. If the search ends
    within its 20,000 steps, the result is optimal. The method is from section 4 of AlpaComm.
    """
    tasks = _crossings(slices, nodes, chunks)
    source = random.Random(0)
    best = min((_greedy(tasks, source) for _ in range(rounds)), key=lambda found: found.seconds,
               default=SliceOrder((), 0.0))
    return _depth_first(tasks, best) if 1 < len(tasks) <= SEARCHED else best


def _add(task: _Crossing, sender: int, free: dict[str, float]) -> tuple[dict[str, float], float]:
    """Return the times at which nodes are free after a slice, and the slice's arrival time."""
    ports = [f"out {sender}", *(f"in {node}" for node in task.receivers)]
    end = max(free.get(port, 0.0) for port in ports) + task.seconds
    return {**free, **dict.fromkeys(ports, end)}, end


def _greedy(tasks: Sequence[_Crossing], source: random.Random) -> SliceOrder:
    left, load, steps = source.sample(tasks, len(tasks)), dict[int, float](), []
    free, last = dict[str, float](), 0.0
    while left:
        out, into, later = set[int](), set[int](), []
        for task in left:
            senders = [node for node in task.senders if node not in out]
            if not senders or not into.isdisjoint(task.receivers):
                later.append(task)
                continue
            sender = min(senders, key=lambda node: (load.get(node, 0.0), node))
            load[sender] = load.get(sender, 0.0) + task.seconds
            out.add(sender)
            into.update(task.receivers)
            steps.append((task.index, sender))
            free, end = _add(task, sender, free)
            last = max(last, end)
        left = later
    return SliceOrder(tuple(steps), last)


def _depth_first(tasks: Sequence[_Crossing], best: SliceOrder) -> SliceOrder:
    """Return the optimal order if `STEPS` steps suffice, otherwise the best order found."""
    count = itertools.count(1)

    def bound(left: Sequence[_Crossing], free: Mapping[str, float]) -> float:
        """Return a lower bound of the time of the nodes that still receive slices."""
        need: dict[int, float] = {}
        for task in left:
            for node in task.receivers:
                need[node] = need.get(node, 0.0) + task.seconds
        return max((free.get(f"in {node}", 0.0) + s for node, s in need.items()), default=0.0)

    def search(left: Sequence[_Crossing], steps: tuple[tuple[int, int], ...],
               free: dict[str, float], last: float) -> None:
        nonlocal best
        if max(last, bound(left, free)) >= best.seconds * (1 - 1e-12) or next(count) > STEPS:
            return
        if not left:
            best = SliceOrder(steps, last)
        for task in left:
            rest = [other for other in left if other is not task]
            for sender in task.senders:
                after, end = _add(task, sender, free)
                search(rest, (*steps, (task.index, sender)), after, max(last, end))

    search(sorted(tasks, key=lambda task: (-task.seconds, task.index)), (), {}, 0.0)
    return best

def _of_a_slice(index: int, each: Slice, nodes: Sequence[int], chunks: int,
                load: dict[int, int], home: int | None = None) -> list[Hop]:
    """Return the transfers (hops) of a slice. home: node that sends to nodes without a sender
    (None: any)."""
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
    senders = [s for s in each.senders if home is None or nodes[s] == home]
    for lane, part in enumerate(_parts((0, each.elements), lanes)):
        sender = _least(senders, part[1] - part[0], load)
        for chunk, run in enumerate(_parts(part, chunks if len(near) > 1 else 1)):
            hops += _chain(index, run, chunk, sender, lane, list(near.values()))
    return hops


def _chain(index: int, run: tuple[int, int], chunk: int, sender: int, lane: int,
           by_node: Sequence[Sequence[int]]) -> list[Hop]:
    """Return the hops of a chunk along the nodes, including the exchange inside each node."""
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
    """Split a range into at most `count` consecutive, non-empty parts of nearly equal length."""
    start, stop = run
    cuts = [start + (stop - start) * i // count for i in range(count + 1)]
    return [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]
