"""Plan the data transfers that change the layout of a tensor (AlpaComm, arXiv 2211.05322).

A layout assigns to each device a box, which is a rectangular part of the tensor. The boundaries of
all boxes in the old and the new layout divide the tensor into unique slices. A device stores each
slice either completely or not at all, and may belong to both layouts. To move a slice, one of the
devices that store it in the old layout multicasts it to all devices that store it only in the new
layout. No data is sent to a device that already stores it.

A slice is sent to each node only once (section 3 of the paper). If g devices of a node need a
slice, each of these devices receives one of g equal parts. The devices then exchange these parts
within the node. If several nodes need a slice, each node forwards its parts to the next node in
chunks, so that all links of this chain of nodes are busy at the same time. Devices on the sender's
node receive the slice directly from the sender.

A node sends only one slice and receives only one slice at a time. Randomized greedy rounds search
for a good sender of each slice and a good order of the slices. If there are few slices, a
depth-first search with pruning follows (section 4 of the paper, `best_order`). `relays` uses the
result of this search unless a simple plan is faster. In the simple plan, large slices are sent
first, and each slice is sent by the device that has the least data to send so far."""

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
    """A layout of a tensor, which assigns to each device the box of the tensor that the device
    stores.

    Attributes:
        shape: shape of the tensor.
        boxes: the box that each device stores. Several devices may store the same elements."""

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

        If a dimension cannot be divided evenly, the lengths of its shards differ by at most 1.

        Args:
            shape: shape of the tensor.
            mesh: mapping from the name of each mesh axis to its size. The slowest axis comes first.
            spec: for each dimension of the tensor, the mesh axes over which the dimension is
                sharded. The tensor is replicated over all other mesh axes.
            devices: device indices in the order of the mesh. Defaults to 0, 1, 2 and so on.
        Raises:
            ValueError: If mesh axes are unknown or repeated, or if `devices` has a wrong length."""
        count = math.prod(mesh.values())
        devices = range(count) if devices is None else devices
        used = [name for names in spec for name in names]
        if len(spec) != len(shape) or set(used) - set(mesh) or len(set(used)) < len(used):
            raise ValueError(
                f"spec {[list(names) for names in spec]} must list axes of the mesh {dict(mesh)} "
                f"for each of the {len(shape)} tensor dimensions, each axis at most once")
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
    """A unique slice of a tensor. Device indices are in ascending order.

    Attributes:
        box: position of the slice in the tensor.
        senders: devices that store the slice in the old layout.
        receivers: devices that store the slice only in the new layout.
        keepers: devices that store the slice in both layouts."""

    box: Box
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    keepers: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements of the slice."""
        return math.prod(stop - start for start, stop in self.box)

    def within(self, box: Box) -> tuple[slice, ...]:
        """Return the position of the slice relative to the tensor's box `box`."""
        return tuple(slice(start - first, stop - first)
                     for (start, stop), (first, _) in zip(self.box, box, strict=True))


def unique_slices(source: TensorLayout, target: TensorLayout) -> list[Slice]:
    """Return all slices that at least one device needs in the new layout, sorted by their boxes.

    Raises:
        ValueError: If the tensor shapes differ, or if no device stores a slice that is needed."""
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
    """Return the devices that store each slice, keyed by the slice's index along each dimension."""
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
    """A transfer that sends a part of a slice from one device to another.

    Attributes:
        slice: index of the slice.
        part: range (start, stop) of the slice's elements that is sent, in row-major order.
        depth: number of hops that the same data has made before.
        chunk: index of the chunk to which the data belongs. Chunks with lower indices arrive first.
    """

    sender: int
    receiver: int
    slice: int
    part: tuple[int, int]
    depth: int
    chunk: int = 0


def relays(slices: Sequence[Slice], nodes: Sequence[int], chunks: int = CHUNKS, *,
           searched: bool = True) -> list[Hop]:
    """Return the hops that send every element of every slice exactly once to each receiver.

    All devices compute the same list of hops. Two plans are compared, and the one that is faster
    according to `hops_s` is returned. In the first plan, large slices are sent first, and each
    slice is sent by the device that has the least data to send so far. The second plan uses the
    senders and the order from `best_order`. The hops are sorted by chunk, depth, order of the
    slices, part and receiver. Devices process the received data in this order.

    Args:
        nodes: for each device, the index of its node.
        chunks: number of chunks into which the data is split if several nodes receive it.
        searched: False to return the first plan without computing the second one.
    """
    largest = sorted(range(len(slices)), key=lambda i: (-slices[i].elements, i))
    plain = _in_order(slices, nodes, chunks, [(i, None) for i in largest])
    order = dict(best_order(slices, nodes, chunks).steps if searched else ())
    if not order:
        return plain
    rest = [(i, None) for i in largest if i not in order]
    found = _in_order(slices, nodes, chunks, [*order.items(), *rest])
    return min(plain, found, key=lambda hops: hops_s(hops, nodes))


def _in_order(slices: Sequence[Slice], nodes: Sequence[int], chunks: int,
              order: Sequence[tuple[int, int | None]]) -> list[Hop]:
    load: dict[int, int] = {}
    place = {index: number for number, (index, _) in enumerate(order)}
    hops = [hop for index, home in order
            for hop in _of_a_slice(index, slices[index], nodes, chunks, load, home)]
    return sorted(hops, key=lambda h: (h.chunk, h.depth, place[h.slice], h.part, h.receiver))


def hops_s(hops: Sequence[Hop], nodes: Sequence[int]) -> float:
    """Return the simulated time of all hops. The unit is the time of one element on one link.

    A node sends only one hop and receives only one hop at a time. Transfers inside a node take no
    time."""
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


@dataclass(frozen=True)
class SliceOrder:
    """Result of `best_order`.

    Attributes:
        steps: pairs (slice, sending node) for the slices that leave a node, in the order of
            sending.
        seconds: arrival time of the last slice. The unit is the time of one element on one link."""

    steps: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(frozen=True)
class _Crossing:
    """A slice that one of the nodes in `senders` sends to all nodes in `receivers`."""

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
    """Return a sender for each slice and a fast order of the slices (section 4 of AlpaComm).

    All devices compute the same senders and order. The best of `rounds` randomized greedy orders is
    used. Each greedy round sends a maximal set of slices that use different nodes. Each slice is
    sent from the sender that has the least data to send so far. With up to 8 slices, a depth-first
    search with pruning tries to improve the best greedy order. If this search ends within 20,000
    steps, the order is optimal."""
    tasks = _crossings(slices, nodes, chunks)
    source = random.Random(0)
    best = min((_greedy(tasks, source) for _ in range(rounds)), key=lambda found: found.seconds,
               default=SliceOrder((), 0.0))
    return _depth_first(tasks, best) if 1 < len(tasks) <= SEARCHED else best


def _add(task: _Crossing, sender: int, free: dict[str, float]) -> tuple[dict[str, float], float]:
    """Return the times at which nodes are free after sending a slice, and the slice's arrival time.
    """
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
    """Return the optimal order, or the best order found within `STEPS` steps."""
    count = itertools.count(1)

    def bound(left: Sequence[_Crossing], free: Mapping[str, float]) -> float:
        """Return a lower bound on the time at which all remaining slices have been received."""
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
    """Return the hops that send one slice. home: the node whose devices send the slice to other
    nodes. By default, any node that stores the slice may send it."""
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
    """Return the hops that send one chunk along the nodes, including exchanges within each node."""
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
    """Split a range into at most `count` consecutive, non-empty ranges of nearly equal length."""
    start, stop = run
    cuts = [start + (stop - start) * i // count for i in range(count + 1)]
    return [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]
