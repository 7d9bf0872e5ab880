"""What must move where a tensor goes from one layout to another (AlpaComm, arXiv 2211.05322).

A layout says which box of a tensor each device stores. The boundaries of all boxes of both layouts
cut the tensor into unique slices: a device stores a slice entirely or not at all. Each slice is one
multicast from any of the devices that store it before to all that store it after and did not
before. Devices may have a part in both layouts, as where the number of expert-parallel ranks
changes; what a device has already, it is not sent.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
