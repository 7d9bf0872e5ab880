"""Pages for the rows that backward needs: one buffer for all layers of a group.

Bounded rows lie in buffers as long as the bound, of which backward needs the used part. That is
copied into pages, as many as are used, and the buffer is free for the next layer: all layers
together keep one buffer of the worst case and what they use, not one of the worst case each. Which
pages are free is known on the device alone, so the host waits for nothing. (Megatron-core and
torchtitan call it a paged stash.)

Where the pages run out, rows go to pages in memory of the host, if there are any; else they are
lost: their gradients are NaN, and the step is reported as for rows that did not fit.
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

PAGE = 1 << 12  # elements; at most one page of a saved tensor is partly empty
MIB = 1 << 20


class PageRing:
    """Free slots of one buffer, given out and taken back in a circle, all on the device.

    slots: how many. Attributes: `free_S`, int64 [slots + 1], the ring, and one for what is none of
    it; `head`, `tail`, int64 scalars: slots given out and taken back since the beginning.
    """

    def __init__(self, slots: int, first: int, device: torch.device) -> None:
        self.slots, self.first = slots, first
        self.free_S = torch.arange(first, first + slots + 1, device=device)
        self.head = torch.zeros((), dtype=torch.int64, device=device)
        self.tail = torch.full((), slots, dtype=torch.int64, device=device)

    def take(self, number: Tensor, index_M: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """(slots int64 [M], whether there were `number`); gives out none where there were fewer.

        Args:
            wanted: bool scalar, whether any are asked for.
            index_M: int64, 0 to M - 1.
        """
        enough = wanted & (self.tail - self.head >= number)
        slot_M = self.free_S[(self.head + index_M) % max(1, self.slots)]
        self.head += number * enough
        return torch.where(enough & (index_M < number), slot_M, -1), enough

    def give(self, record_M: Tensor, index_M: Tensor) -> None:
        """Take back the slots of a record that are this ring's."""
        mine_M = (record_M >= self.first) & (record_M < self.first + self.slots)
        place_M = torch.where(mine_M, (self.tail + index_M) % max(1, self.slots), self.slots)
        self.free_S.index_copy_(0, place_M, record_M)
        self.tail += mine_M.sum()


class Pages:
    """The pages of one dtype on one device.

    Attributes: `in_use`, `most`, `lost`, int64 scalars on the device: pages that tensors have or
    found missing, the most of them at once, and tensors that found none.
    """

    def __init__(self, slots: int, host: int, like: Tensor) -> None:
        device, pinned = like.device, host > 0 and like.device.type == "cuda"
        if pinned and not INSTALLED:
            raise ValueError("dispatch.stash_host_mib > 0 needs Triton on a GPU: its kernels alone "
                             "reach memory of the host; install triton, or use 0")
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
        """(record int64 [M], pages wanted, whether they were there).

        Args:
            x_N: [N].
            used: int64 scalar, how many of its first elements are kept.
        """
        if not capturing(x_N.device):  # each replay would take them back again
            self.settle()
        number = torch.div(used + PAGE - 1, PAGE, rounding_mode="floor")
        index_M = torch.arange(-(-x_N.shape[0] // PAGE), device=x_N.device)
        record_M, enough = self.rings[0].take(number, index_M, number >= 0)
        on_host_M, on_host = self.rings[1].take(number, index_M, ~enough)
        record_M, enough = torch.maximum(record_M, on_host_M), enough | on_host
        self.in_use += number
        self.most.copy_(torch.maximum(self.most, self.in_use))
        self.lost += ~enough
        write_pages(x_N, record_M, self.pages_SP, self.host_SP)
        return record_M, number, enough

    def free(self, record_M: Tensor, number: Tensor) -> None:
        """Take the pages of a record back."""
        index_M = torch.arange(record_M.shape[0], device=record_M.device)
        for ring in self.rings:
            ring.give(record_M, index_M)
        self.in_use -= number

    @torch.no_grad()
    def drop(self, record_M: Tensor, number: Tensor) -> None:
        """`free`, by the next `write`: garbage is collected in any thread, with any current stream,
        so that nothing may be launched there. In a CUDA graph at once, as each replay has to.
        """
        if capturing(record_M.device):
            self.free(record_M, number)
        else:
            self._dropped.append((record_M, number))

    @torch.no_grad()
    def settle(self) -> None:
        """Take back now what was dropped."""
        while self._dropped:
            self.free(*self._dropped.popleft())


class Kept:
    """Rows in pages. They are free again when nothing refers to this any more, so that a graph
    which is kept, or dropped without a backward pass, needs no care.
    """

    def __init__(self, pages: Pages, x_RD: Tensor, lengths_L: Tensor) -> None:
        self.pages, self.shape = pages, x_RD.shape
        self.record_M, self.number, self.enough = pages.write(
            x_RD.reshape(-1), lengths_L.sum() * x_RD.shape[1])

    def rows(self) -> Tensor:
        """The rows again, in a buffer of the same shape, whose filler holds any values."""
        x_N = read_pages(self.record_M, self.pages.pages_SP, self.pages.host_SP,
                         math.prod(self.shape), self.enough)
        return x_N.view(self.shape)

    def __del__(self) -> None:
        # an object whose making failed has no record
        if "enough" in vars(self) and not sys.is_finalizing():
            self.pages.drop(self.record_M, self.number)


class PagedStash(Limit):
    """The pages of all layers of a group on this rank, by dtype, made when first used.

    Its settings are those of the layers that exist: the largest sizes, and to repeat a step where
    any does.

    Attributes: `bytes`, `host_bytes`: memory for each dtype, on the device and of the host.
    """

    remedy = ("what backward needs took {needed} bytes, more than dispatch.stash_mib and "
              "dispatch.stash_host_mib hold; raise one of them")

    def __init__(self) -> None:
        self._asked: WeakKeyDictionary[object, DispatchConfig] = WeakKeyDictionary()
        self._grown = 0  # bytes that an overflow asked for
        self._pages: dict[tuple[torch.dtype, torch.device], Pages] = {}

    def ask(self, layer: object, config: DispatchConfig) -> None:
        """The settings of something that lives as long as a layer."""
        if not self._asked:  # those before it are gone, with what they needed
            self._grown = 0
            self._pages.clear()
        self._asked[layer] = config

    @property
    def made(self) -> list[Pages]:
        """The pages that exist, one entry a dtype and device."""
        return [*self._pages.values()]

    @property
    def bytes(self) -> int:
        """See the class."""
        return max([self._grown, *(int(c.stash_mib * MIB) for c in self._asked.values())])

    @property
    def host_bytes(self) -> int:
        """See the class."""
        return max([0, *(int(c.stash_host_mib * MIB) for c in self._asked.values())])

    @property
    def repeats(self) -> bool:  # type: ignore[override]
        return any(c.on_overflow == "repeat" for c in self._asked.values())

    @property
    def needed(self) -> Tensor | None:  # type: ignore[override]
        """See `Limit`; bytes."""
        each = [pages.most * (pages.lost > 0) * (PAGE * dtype.itemsize)
                for (dtype, _), pages in self._pages.items()]
        return torch.stack(each).amax() if each else None

    def grow(self, needed: int) -> None:
        """See `Limit`. Tensors that are still in pages stay there."""
        self._grown = max(self._grown, with_room(needed))
        self._pages.clear()

    def forget(self) -> None:
        for pages in self._pages.values():
            pages.settle()
            pages.lost.zero_()
            pages.most.copy_(pages.in_use)

    def pages(self, like: Tensor) -> Pages:
        """The pages for tensors like this one, more where a later layer asked for more."""
        key, page = (like.dtype, like.device), PAGE * like.element_size()
        wanted = self.bytes // page, self.host_bytes // page
        known = self._pages.get(key)
        slots = (0, 0) if known is None else tuple(ring.slots for ring in known.rings)
        if known is None or wanted[0] > slots[0] or wanted[1] > slots[1]:
            made = self._pages[key] = Pages(*map(max, wanted, slots), like)
            if known is not None:  # what is in the others stays there, and what they lost counts
                made.lost.copy_(known.lost)
                made.most.copy_(known.most)
        return self._pages[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedStash:
        return self  # a copy of a model has the same group

    def __getstate__(self) -> dict[str, Any]:
        return {"_grown": self._grown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._grown = state["_grown"]

    def keep(self, x_RD: Tensor, lengths_L: Tensor) -> Kept:
        """Copy the rows of all experts into pages.

        Args:
            x_RD: [R, width], rows of the experts first, filler after them.
            lengths_L: int64 [L].
        """
        return Kept(self.pages(x_RD), x_RD, lengths_L)


def may_keep() -> bool:
    """Whether rows may go to pages now: not where another decides what autograd saves.

    That is activation checkpointing, which keeps nothing, and torch.compile.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    # private, but how torch.utils.checkpoint itself asks
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None
