"""Two memory areas on the device that the segments of a model use alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.memory.passes import aligned_buffer
from moe_plugin.memory.weights.blocks import StreamedBlock


class Slots:
    """Two memory areas on the device. Segment `i` uses area `i % 2`.

    While one segment is computed, an adjacent segment can be copied to the device. The weights of a
    segment remain in their area until another segment needs the area. As a result, the weights of
    two segments are already on the device when the backward pass or the next step starts.

    Args:
        segments: for each segment, the list of its blocks.
        device: device that computes the blocks.
        copier: copier that copies the weights to the device.

    Attributes:
        nbytes: total size of both areas in bytes.
    """

    def __init__(self, segments: Sequence[Sequence[StreamedBlock]], device: torch.device,
                 copier: Copier) -> None:
        self.segments = [list(segment) for segment in segments]
        self.copier = copier
        sizes = place_sizes(segments)
        self.nbytes = sum(sizes)
        self._buffers = [aligned_buffer(size, device) for size in sizes]
        self._holds: list[int | None] = [None, None]
        # blocks whose weights are in an area, or are being copied there
        self._tickets: dict[int, Ticket | None] = {}
        self._attached: set[int] = set()
        self._parts = {}
        for index, segment in enumerate(self.segments):
            begin = 0
            for block in segment:
                end = begin + (block.layout.nbytes if block.streams else 0)
                self._parts[block.number] = (index, begin, end)
                begin = end

    def blocks(self, order: Sequence[int], backward: bool = False, overlap: bool = True,
               before: Callable[[StreamedBlock],
                                object] = lambda block: None) -> Iterator[StreamedBlock]:
        """Yield the blocks of the given segments, one after another. When a block is yielded, its
        weights are on the device.

        Args:
            order: indices of the segments, in order of use.
            backward: if True, the blocks of each segment are yielded in reverse order.
            overlap: if True, the weights of the next segment are copied while the blocks of the
                current segment are used.
            before: function that is called for each block before any further copies start.
        """
        for position, index in enumerate(order):
            self._claim(index)
            current_blocks = self.segments[index][::-1] if backward else self.segments[index]
            coming: list[StreamedBlock] = []
            if overlap and position + 1 < len(order):
                self._claim(order[position + 1])
                coming = self.segments[order[position + 1]]
                coming = [b for b in (coming[::-1] if backward else coming)
                          if b.number not in self._tickets]
            for number, block in enumerate(current_blocks):
                self._fetch(block)
                before(block)
                # The copier works in order. The next segment's copies are spread over this
                # segment's blocks, so that copies which `before` starts do not wait behind all of
                # them.
                share = slice(len(coming) * number // len(current_blocks),
                              len(coming) * (number + 1) // len(current_blocks))
                for other in coming[share]:
                    self._fetch(other)
                self._attach(block)
                yield block

    def _claim(self, index: int) -> None:
        place = index % 2
        held = self._holds[place]
        if held == index:
            return
        if held is not None:
            for block in self.segments[held]:
                self._forget(block)
        self._holds[place] = index

    def _forget(self, block: StreamedBlock) -> None:
        # an unused copy that is still in progress writes into the area, so it must end before the
        # next copy into the area starts
        ticket = self._tickets.pop(block.number, None)
        if block.number in self._attached:
            self._attached.remove(block.number)
            block.detach()
        elif ticket is not None:
            ticket.wait()

    def _fetch(self, block: StreamedBlock) -> None:
        if block.number not in self._tickets:
            self._tickets[block.number] = (
                block.fetch(self.copier, self._part(block)) if block.streams else None)

    def _attach(self, block: StreamedBlock) -> None:
        if block.number in self._attached:
            return
        ticket = self._tickets[block.number]
        if ticket is not None:
            ticket.wait()
            block.attach(self._part(block))
        self._attached.add(block.number)

    def _part(self, block: StreamedBlock) -> torch.Tensor:
        index, begin, end = self._parts[block.number]
        return self._buffers[index % 2][begin:end]

    def stale(self, block: StreamedBlock) -> None:
        """Mark the weights of a block on the device as outdated, so that they are copied again.

        If the next step begins with this block, the copy starts immediately.
        """
        self._forget(block)
        # the next step starts with segments 0 and 1
        if self._parts[block.number][0] < 2:
            self._fetch(block)

    def clear(self) -> None:
        """Empty both areas."""
        for segment in self.segments:
            for block in segment:
                self._forget(block)
        self._holds = [None, None]


def place_sizes(segments: Sequence[Sequence[StreamedBlock]]) -> list[int]:
    """Return the required sizes of the two areas for the given segments, in bytes."""
    bytes_ = [sum(b.layout.nbytes for b in segment if b.streams) for segment in segments]
    return [max(bytes_[place::2], default=0) for place in (0, 1)]
