"""Groups of rows (one group per expert), and the tiles into which a grouped matmul is divided.

This module also contains the operations that copy rows to and from pages, and the operation that
transposes chunks for the 2DH exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.registry import op
from moe_plugin.records import DeviceCounts, RowCounts


# Pages store rows in slots of one buffer, for copies with lengths that only the device knows.
#
# A buffer is [S + 1, P]: S slots of P elements, and an additional slot for elements that are not
# stored. A second buffer `host` lies in host memory, and its slots are numbered from S on. The
# record of a tensor, int64 [M], contains the slot of each run of P elements, or -1 for a run that
# is not stored.
@op
def write_pages(x_N: Tensor, record_M: Tensor, pages_SP: Tensor, host_SP: Tensor) -> Tensor:
    """Copy each run of `x_N` that has a slot to this slot. Return the slots of `pages_SP`, [S, P].

    The last run is padded with zeros.

    Args:
        x_N: values [N] of any dtype, where N <= M * P.
        record_M: the slot of each run, int64 [M].
        pages_SP: buffer on the device, of the dtype of x, which is changed in place.
        host_SP: buffer in host memory, of the dtype of x, which is changed in place.
    """
    size, pages = pages_SP.shape[1], record_M.shape[0]
    x_MP = F.pad(x_N, (0, pages * size - x_N.shape[0])).view(pages, size)
    for buffer_SP, slot_M in zip((pages_SP, host_SP), _slots(record_M, pages_SP, host_SP),
                                 strict=True):
        buffer_SP.index_copy_(0, slot_M, x_MP)
    return pages_SP[:-1]


@op
def read_pages(record_M: Tensor, pages_SP: Tensor, host_SP: Tensor, length: int,
               enough: Tensor) -> Tensor:
    """Return the first `length` elements of the tensor that `record_M` describes, [length].

    Elements of runs without a slot have arbitrary values.

    Args:
        record_M: the slot of each run, int64 [M], where length <= M * P.
        pages_SP, host_SP: floating-point buffers on the device and in host memory.
        length: number of elements to return.
        enough: bool scalar tensor on the device. If `enough` is False, all returned elements are
            NaN.
    """
    device_slot_M, host_slot_M = _slots(record_M, pages_SP, host_SP)
    x_MP = pages_SP.index_select(0, device_slot_M)
    if host_SP.shape[0] > 1:
        on_host_M1 = (record_M >= pages_SP.shape[0] - 1)[:, None]
        x_MP = torch.where(on_host_M1, host_SP.index_select(0, host_slot_M), x_MP)
    return x_MP.view(-1)[:length].masked_fill_(~enough, torch.nan)


def _slots(record_M: Tensor, pages_SP: Tensor, host_SP: Tensor) -> tuple[Tensor, Tensor]:
    """For each run, return its slot in both buffers. If a run is not stored in a buffer, its slot
    in this buffer is the last slot.
    """
    device_slots, host_slots = pages_SP.shape[0] - 1, host_SP.shape[0] - 1
    on_host_M = record_M >= device_slots
    return (torch.where(on_host_M | (record_M < 0), device_slots, record_M),
            torch.where(on_host_M, record_M - device_slots, host_slots))


@op
def transpose_chunks(x: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder equal chunks of dimension 0 from the order [outer, inner] to the order [inner,
    outer].

    In 2DH (Tutel), the chunks are ordered by destination rank (node, local). The chunks are
    reordered to (local, node), so that each rank sends one contiguous chunk to each rank of its
    node. A second call with swapped `outer` and `inner` reverses the reordering.

    x: tensor [outer * inner * c, ...] of any dtype. The output has the same shape and dtype.
    """
    if x.shape[0] % (outer * inner):
        raise ValueError(
            f"A tensor of {x.shape[0]} rows cannot be split into {outer} x {inner} chunks of equal "
            f"size. Pad the rows to a multiple of {outer * inner}."
        )
    chunks = x.reshape(outer, inner, -1).transpose(0, 1)
    return chunks.reshape(x.shape)


@op
def tile_table(lengths_L: Tensor, height: int, total: int,
               least: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the table of tiles as three int32 tensors (group, first row, used), with shapes [M],
    [M] and [1]. The tensor `used` contains the number of tiles.

    No tile spans two groups. The host does not wait for the device. The table has M = total //
    height + L entries, which is enough for any lengths. Unused entries at the end have group -1 and
    row 0.

    Args:
        lengths_L: int64 [L], number of rows of each group. The groups are stored one after another.
        height: number of rows in a tile.
        total: total number of rows of all groups, or an upper bound of this number.
        least: number of tiles (0 or 1) that are created for a group without rows.
    """
    groups, device = lengths_L.numel(), lengths_L.device
    if groups == 0:
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return empty, empty.clone(), torch.zeros(1, dtype=torch.int32, device=device)
    # All values are computed on the device from the lengths, so that the host need not know them.
    tiles_L = torch.div(lengths_L + (height - 1), height, rounding_mode="floor").clamp_(min=least)
    last_L, end_L = tiles_L.cumsum(0), lengths_L.cumsum(0)
    tile_M = torch.arange(most_tiles(groups, height, total), device=device)
    group_M = torch.searchsorted(last_L, tile_M, right=True)
    used_M, at_M = group_M < groups, group_M.clamp(max=groups - 1)
    row_M = (end_L - lengths_L - (last_L - tiles_L) * height)[at_M] + tile_M * height
    return (torch.where(used_M, group_M, -1).to(torch.int32),
            torch.where(used_M, row_M, 0).to(torch.int32), last_L[-1:].to(torch.int32))


def most_tiles(groups: int, height: int, total: int) -> int:
    """Return M, the number of entries of the table that `tile_table` creates. M is the largest
    number of tiles into which `total` rows in `groups` groups can be divided.
    """
    return total // height + groups if groups else 0


@dataclass(frozen=True)
class TileSchedule:
    """Options that determine how the programs of a kernel process their tiles. The outputs of all
    schedules are bitwise equal.

    Attributes:
        specialize: whether different warps of a program load operands, multiply, and store outputs.
            Specialized warps are used for matmuls with a single matrix whose rows need no
            gathering.
        split: number of parts (1 or 2) in which the columns of a tile are stored.
    """

    specialize: bool = False
    split: int = 1


# Schedules by name. The empty name selects the schedule that all GPUs and Triton versions support.
SCHEDULES = {"": TileSchedule(), "split": TileSchedule(split=2),
             "specialized": TileSchedule(specialize=True)}


@dataclass(frozen=True)
class RowGroups:
    """Groups of rows, with tables of row counts on one device. The tables are created without
    copying data from the device to the host.

    Rows after the last group (filler, see `DeviceCounts`) belong to no group.

    Attributes:
        counts: number of rows of each group.
        device: device on which the tables are stored.
        beside: whether the kernels of an exchange run at the same time as matmuls over these rows.
        schedule: name of the schedule for matmuls that are computed by Triton; a key of
            `SCHEDULES`. RowGroups stores the name rather than the schedule, because a graph can
            contain the name.
    """

    counts: RowCounts
    device: torch.device
    beside: bool = False
    schedule: str = ""
    _tables: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False)
    _filled: dict[int, tuple[RowGroups, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False)

    @property
    def total(self) -> int:
        """Total number of rows R, including filler."""
        return self.counts.total

    @property
    def number(self) -> int:
        """Number of groups, L."""
        return self.counts.number

    @cached_property
    def lengths_L(self) -> Tensor:
        """The number of rows of each group, int64 [L] on the device."""
        return self.counts.device(self.device)

    @cached_property
    def ends_L(self) -> Tensor:
        """The index of the first row after each group, int32 [L] on the device."""
        return self.lengths_L.cumsum(0, dtype=torch.int32)

    @cached_property
    def group_R(self) -> Tensor:
        """The group of each row, int64 [R] on the device. Filler rows belong to the last group."""
        if isinstance(self.counts, DeviceCounts):
            row_R = torch.arange(self.total, device=self.device)
            group_R = torch.searchsorted(self.lengths_L.cumsum(0), row_R, right=True)
            return group_R.clamp_(max=self.number - 1)
        return torch.repeat_interleave(self.lengths_L, output_size=self.total)

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Yield (group, slice of its rows) for each group, including groups without rows. If the
        lengths are known only on the device, the host waits for the device.
        """
        start = 0
        for group, count in enumerate(self.counts.lengths()):
            yield group, slice(start, start + count)
            start += count

    def tiles(self, height: int, least: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return the table (group, first row, used) of tiles with `height` rows; see `tile_table`.

        The table is computed once, and all matmuls with these groups and this height share it.
        """
        if (height, least) not in self._tables:
            self._tables[height, least] = tile_table(self.lengths_L, height, self.total, least)
        return self._tables[height, least]

    def filled(self, step: int) -> tuple[RowGroups, Tensor]:
        """Pad each group to a positive multiple of `step` rows, and return (groups, row_P).

        The tensor `row_P`, int64 [P], contains the row index for each of the P positions, or -1 for
        padding. The padded groups are computed once and shared by all matmuls with blocks along the
        rows. The host does not wait for the device.
        """
        if step not in self._filled:
            self._filled[step] = self._fill(step)
        return self._filled[step]

    def _fill(self, step: int) -> tuple[RowGroups, Tensor]:
        device, total, counts = self.device, self.total, self.counts
        if isinstance(counts, DeviceCounts):
            steps_L = torch.div(self.lengths_L + (step - 1), step, rounding_mode="floor")
            places = -(-total // step) * step + step * self.number
            counts = DeviceCounts(steps_L.clamp_(min=1) * step, places)
        else:
            counts = RowCounts([max(1, -(-n // step)) * step for n in counts.host])
            places = counts.total
        filled = RowGroups(counts, device, self.beside, self.schedule)
        row_R = torch.arange(total, device=device)
        shift_L = (filled.lengths_L.cumsum(0) - filled.lengths_L
                   - self.lengths_L.cumsum(0) + self.lengths_L)
        # Filler is written to an additional position, which is removed below.
        at_R = torch.where(row_R < self.ends_L[-1], row_R + shift_L[self.group_R], places)
        row_P = torch.full((places + 1,), -1, device=device)
        return filled, row_P.index_copy_(0, at_R, row_R)[:places]
