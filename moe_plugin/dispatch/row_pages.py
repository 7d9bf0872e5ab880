"""Pages that store rows for the backward pass. All layers of a group share the pages.

Bounded rows are stored in buffers of a fixed length, but the backward pass needs only the real rows
and not the padding. The real rows are copied into pages, so that the next layer can use the buffer.
With pages, all layers together need a single buffer and the pages in use. Without pages, each layer
would need its own buffer. Only the device knows which pages are free, so the host never waits.
Megatron-core and torchtitan call this method a paged stash.

If no page is free on the device, rows are stored in pages in host memory, if there are any.
If no page is free in host memory either, the rows are lost: their gradients are NaN, and the step
reports an overflow.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_plugin.config import DispatchConfig
from moe_plugin.dispatch.rows_limit import Limit, with_room
from moe_plugin.kernels.groups import read_pages, write_pages
from moe_plugin.kernels.triton_ops import INSTALLED
from moe_plugin.utils.machine import capturing, pinned_buffer

PAGE = 1 << 12  # elements per page; only the last page of a saved tensor is partly empty
MIB = 1 << 20


class PageRing:
    """A ring buffer on the device that contains the free pages of one memory area.

    Args:
        slots: number of pages.
        first: index of the first page.
        device: device of the ring.

    Attributes:
        free_S: int64 [slots + 1], the indices of the free pages. The last element receives the
            writes for invalid pages.
        head: int64 scalar, the total number of pages that `take` has removed.
        tail: int64 scalar, `slots` plus the total number of pages that `give` has returned.
    """

    def __init__(self, slots: int, first: int, device: torch.device) -> None:
        self.slots, self.first = slots, first
        self.free_S = torch.arange(first, first + slots + 1, device=device)
        self.head = torch.zeros((), dtype=torch.int64, device=device)
        self.tail = torch.full((), slots, dtype=torch.int64, device=device)

    def take(self, number: Tensor, index_M: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Remove `number` pages from the ring. If fewer pages are free, no page is removed.

        Args:
            number: int64 scalar, the number of pages to remove.
            index_M: int64 [M], the integers from 0 to M - 1. M is an upper bound of `number`.
            wanted: bool scalar. If `wanted` is False, no page is removed.
        Returns: The removed pages, int64 [M], padded with -1, and a bool scalar that is True if
        there were enough pages.
        """
        enough = wanted & (self.tail - self.head >= number)
        slot_M = self.free_S[(self.head + index_M) % max(1, self.slots)]
        # tensors, not Python numbers: the host does not know how many pages were taken
        self.head += number * enough
        return torch.where(enough & (index_M < number), slot_M, -1), enough

    def give(self, record_M: Tensor, index_M: Tensor) -> None:
        """Put the pages of a record that belong to this ring back into the ring."""
        mine_M = (record_M >= self.first) & (record_M < self.first + self.slots)
        place_M = torch.where(mine_M, (self.tail + index_M) % max(1, self.slots), self.slots)
        self.free_S.index_copy_(0, place_M, record_M)
        self.tail += mine_M.sum()


class Pages:
    """The pages for tensors of one dtype on one device.

    Args:
        slots: number of pages on the device.
        host: number of pages in host memory.
        like: tensor whose dtype and device the pages should have.

    Attributes:
        in_use: int64 scalar on the device, the number of pages in use. Pages that were needed but
            not available are counted as well.
        most: int64 scalar on the device, the largest value of `in_use` so far.
        lost: int64 scalar on the device, the number of tensors that could not be stored.
    """

    def __init__(self, slots: int, host: int, like: Tensor) -> None:
        device, pinned = like.device, host > 0 and like.device.type == "cuda"
        if pinned and not INSTALLED:
            raise ValueError("dispatch.stash_host_mib > 0 needs Triton on a GPU, because only "
                             "Triton kernels can access host memory. Install triton, or use 0")
        # the last page absorbs the writes of rows for which there is no page
        self.pages_SP = torch.empty(slots + 1, PAGE, dtype=like.dtype, device=device)
        if pinned:
            self.host_SP = pinned_buffer((host + 1, PAGE), like.dtype, device)
        else:
            self.host_SP = torch.empty(host + 1, PAGE, dtype=like.dtype, device=device)
        self.rings = [PageRing(slots, 0, device), PageRing(host, slots, device)]
        self.in_use, self.most, self.lost = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))
        self._dropped: deque[tuple[Tensor, Tensor]] = deque()

    def write(self, x_N: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the first elements of a tensor into pages.

        Args:
            x_N: [N], the tensor to store.
            used: int64 scalar, the number of elements to store.
        Returns: The pages, int64 [M], the number of pages needed, and whether that many were free.
        """
        if not capturing(x_N.device):  # each replay of the graph would free them again
            self.settle()
        number = torch.div(used + PAGE - 1, PAGE, rounding_mode="floor")
        index_M = torch.arange(-(-x_N.shape[0] // PAGE), device=x_N.device)
        record_M, enough = self.rings[0].take(number, index_M, number >= 0)
        # host pages are used only if the device has not enough pages for the whole tensor
        on_host_M, on_host = self.rings[1].take(number, index_M, ~enough)
        # At most one of the two records contains pages. The other one contains only -1.
        record_M, enough = torch.maximum(record_M, on_host_M), enough | on_host
        self.in_use += number
        self.most.copy_(torch.maximum(self.most, self.in_use))
        self.lost += ~enough
        write_pages(x_N, record_M, self.pages_SP, self.host_SP)
        return record_M, number, enough

    def free(self, record_M: Tensor, number: Tensor) -> None:
        """Put the pages of a record back into their rings."""
        index_M = torch.arange(record_M.shape[0], device=record_M.device)
        for ring in self.rings:
            ring.give(record_M, index_M)
        self.in_use -= number

    @torch.no_grad()
    def drop(self, record_M: Tensor, number: Tensor) -> None:
        """Mark the pages of a record to be freed by the next `write`.

        The garbage collector calls this method, in any thread and with any current stream. The
        method must therefore not launch a kernel. While a CUDA graph is captured, the pages are
        freed immediately, because every replay of the graph must free them.
        """
        if capturing(record_M.device):
            self.free(record_M, number)
        else:
            self._dropped.append((record_M, number))

    @torch.no_grad()
    def settle(self) -> None:
        """Free all pages that were passed to `drop`."""
        while self._dropped:
            self.free(*self._dropped.popleft())


class Kept:
    """The rows of one call that are stored in pages.

    The pages are freed when this object is deleted. An autograd graph that is retained, or deleted
    without a backward pass, therefore needs no special handling.

    Args:
        pages: the pages to use.
        x_RD: [R, D], the rows followed by padding.
        lengths_L: int64 [L], the number of rows for each expert.
    """

    def __init__(self, pages: Pages, x_RD: Tensor, lengths_L: Tensor) -> None:
        self.pages, self.shape = pages, x_RD.shape
        self.record_M, self.number, self.enough = pages.write(
            x_RD.reshape(-1), lengths_L.sum() * x_RD.shape[1])

    def rows(self) -> Tensor:
        """Return the stored rows in a buffer of the original shape. The padding rows of the
        returned buffer contain arbitrary values.
        """
        x_N = read_pages(self.record_M, self.pages.pages_SP, self.pages.host_SP,
                         math.prod(self.shape), self.enough)
        return x_N.view(self.shape)

    def __del__(self) -> None:
        # if the constructor failed, there is no record to free
        if "enough" in vars(self) and not sys.is_finalizing():
            self.pages.drop(self.record_M, self.number)


class PagedStash(Limit):
    """The pages on this rank that all layers of a group share.

    The pages for a dtype are allocated when the dtype is first used.

    The size of the pages is the maximum that any existing layer configures. After an overflow, the
    step is repeated if at least one layer is configured to repeat.
    """

    remedy = ("the rows needed in backward took {needed} bytes, more than dispatch.stash_mib and "
              "dispatch.stash_host_mib allow. Raise one of the two settings")

    def __init__(self) -> None:
        self._asked: WeakKeyDictionary[object, DispatchConfig] = WeakKeyDictionary()
        self._grown = 0  # bytes that were needed at the last overflow
        self._pages: dict[tuple[torch.dtype, torch.device], Pages] = {}

    def ask(self, layer: object, config: DispatchConfig) -> None:
        """Register the settings of a layer.

        Args:
            layer: object that exists as long as the layer.
            config: dispatch settings of the layer.
        """
        if not self._asked:  # all earlier layers were deleted, so their pages are not needed
            self._grown = 0
            self._pages.clear()
        self._asked[layer] = config

    @property
    def made(self) -> list[Pages]:
        """All allocated `Pages` objects, one for each dtype and device."""
        return [*self._pages.values()]

    @property
    def bytes(self) -> int:
        """Configured size of the pages in device memory, in bytes per dtype."""
        return max([self._grown, *(int(c.stash_mib * MIB) for c in self._asked.values())])

    @property
    def host_bytes(self) -> int:
        """Configured size of the pages in host memory, in bytes per dtype."""
        return max([0, *(int(c.stash_host_mib * MIB) for c in self._asked.values())])

    @property
    def repeats(self) -> bool:  # type: ignore[override]
        return any(c.on_overflow == "repeat" for c in self._asked.values())

    @property
    def needed(self) -> Tensor | None:  # type: ignore[override]
        """See `Limit`. The needed size is given in bytes."""
        # 0 unless a tensor was lost: only then were the pages too few
        needed = [pages.most * (pages.lost > 0) * (PAGE * dtype.itemsize)
                  for (dtype, _), pages in self._pages.items()]
        return torch.stack(needed).amax() if needed else None

    def grow(self, needed: int) -> None:
        """See `Limit`. Tensors that are already stored remain in the old pages."""
        self._grown = max(self._grown, with_room(needed))
        self._pages.clear()

    def forget(self) -> None:
        for pages in self._pages.values():
            pages.settle()
            pages.lost.zero_()
            pages.most.copy_(pages.in_use)

    def pages(self, like: Tensor) -> Pages:
        """Return the pages for tensors that have the dtype and device of `like`.

        If the configured size has grown since the last call, larger pages are allocated.
        """
        key, page = (like.dtype, like.device), PAGE * like.element_size()
        wanted = self.bytes // page, self.host_bytes // page
        old = self._pages.get(key)
        device, host = (0, 0) if old is None else (ring.slots for ring in old.rings)
        if old is None or wanted[0] > device or wanted[1] > host:
            new = self._pages[key] = Pages(max(wanted[0], device), max(wanted[1], host), like)
            if old is not None:  # stored tensors remain in the old pages; keep their counters
                new.lost.copy_(old.lost)
                new.most.copy_(old.most)
        return self._pages[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedStash:
        return self  # a copy of a model uses the same group and the same pages

    def __getstate__(self) -> dict[str, Any]:
        return {"_grown": self._grown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._grown = state["_grown"]

    def keep(self, x_RD: Tensor, lengths_L: Tensor) -> Kept:
        """Copy the rows of all experts into pages.

        Args:
            x_RD: [R, width], the rows of the experts followed by padding.
            lengths_L: int64 [L], the number of rows of each expert.
        """
        return Kept(self.pages(x_RD), x_RD, lengths_L)


def may_keep() -> bool:
    """Return whether rows may currently be stored in pages.

    Returns False under activation checkpointing and under `torch.compile`, because they determine
    which tensors autograd saves.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    # a private function, which torch.utils.checkpoint itself uses for this question
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None
