"""Forward and backward passes of a sequence of blocks, one block at a time for all micro-batches.

Only inputs of blocks are kept; a block's backward pass computes it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.routing.replay import first_pass, record_routing, replay_routing
from moe_plugin.utils.machine import pinned_buffer

# Several tensors in one flat buffer, so that one copy moves all of them.
ALIGNMENT = 256  # bytes; products of matrices may round otherwise at other alignments


@dataclass(frozen=True)
class FlatLayout:
    """Where tensors lie in a buffer of bytes.

    Attributes:
        shapes, dtypes: of the tensors.
        offsets: first byte of each.
        nbytes: of the buffer.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> FlatLayout:
        """The layout of tensors in their order."""
        offsets, end = [], 0
        for x in tensors:
            offsets.append(end)
            end += -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
        return cls(tuple(x.shape for x in tensors), tuple(x.dtype for x in tensors),
                   tuple(offsets), end)

    def views(self, flat_N: Tensor) -> list[Tensor]:
        """The tensors, as parts of a buffer [nbytes] of uint8 that starts at an aligned byte."""
        views = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            part_N = flat_N[offset:offset + shape.numel() * dtype.itemsize]
            views.append(part_N.view(dtype).view(shape))
        return views

    def fill(self, flat_N: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy tensors to their places in a buffer."""
        with torch.no_grad():
            for view, x in zip(self.views(flat_N), tensors, strict=True):
                view.copy_(x)


def aligned_buffer(nbytes: int, device: torch.device | str,
                   pinned_for: torch.device | None = None) -> Tensor:
    """[nbytes] of uint8, not initialised, whose first byte is aligned.

    pinned_for: a GPU that reaches this host memory; None: none does.
    """
    if pinned_for is not None:
        return pinned_buffer((nbytes,), torch.uint8, pinned_for)
    if torch.device(device).type == "cpu" and nbytes:
        # not from the heap, where a small neighbour would keep a large buffer's memory
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8)
    raw_N = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw_N.data_ptr() % ALIGNMENT
    return raw_N[skip:skip + nbytes]


def give_back_free_memory() -> None:
    """Let the C library return to the system what it keeps for later, where it can (glibc): it
    keeps freed gradients between small blocks that live.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def absent(like: Tensor) -> Tensor:
    """A tensor of this shape that takes no memory: one value, not a number where there is such."""
    value = float("nan") if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


Place = tuple[nn.Module, str]  # of a buffer


class BlockPasses:
    """The activations of one step.

    Args:
        modules: the blocks.
        loss: `loss(output, target)`, a scalar.
        randomness: `randomness(micro_batch, block)`, within which a block draws the same random
            numbers in every pass.
    """

    def __init__(self, modules: Sequence[nn.Module], loss: Callable[[Tensor, Any], Tensor],
                 randomness: Callable[[int, int], AbstractContextManager[None]]) -> None:
        self.modules, self.loss, self.randomness = list(modules), loss, randomness
        self._moving: list[list[Place]] = [[] for _ in modules]
        self.begin([])

    def begin(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> None:
        """A new step with these inputs and targets."""
        self._x = [x for x, _ in micro_batches]  # output of the last block that ran
        self._targets = [target for _, target in micro_batches]
        self._inputs: list[list[Tensor]] = [[] for _ in self.modules]
        self._tapes: list[list[Any]] = [[] for _ in self.modules]
        self._gradients: list[Tensor | None] = [None] * len(self._x)
        self._losses: list[Tensor] = []
        self._balance: list[Tensor | None] = [None] * len(self._x)

    @property
    def kept_bytes(self) -> list[int]:
        """Bytes kept for the backward pass of each block, of one micro-batch."""
        return [sum(x.numel() * x.element_size() for x in inputs[:1]) for inputs in self._inputs]

    def end(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Losses and sums of the blocks' own losses of each micro-batch; forget the rest."""
        balance = [torch.zeros(()) if x is None else x for x in self._balance]
        losses = tuple(self._losses)
        self.begin([])
        return losses, tuple(balance)

    def forward(self, number: int, keep: bool) -> None:
        """A block's first pass, for all micro-batches.

        keep: for backward. Raises: ValueError: it returned something else than it may.
        """
        module = self.modules[number]
        before = _values(module) if keep else {}
        for m, x in enumerate(self._x):
            with (torch.no_grad(), first_pass(), self.randomness(m, number),
                  record_routing() as tape):
                y, own = self._call(number, x)
            if keep:
                self._inputs[number].append(x)
                self._tapes[number].append(tape)
            self._x[m] = y
            self._add_balance(m, own)
        if keep:
            self._moving[number] = [place for place, buffer in _buffers(module) if place not in
                                    before or not torch.equal(buffer, before[place])]

    def losses(self) -> None:
        """The losses of the last block's outputs, without backward."""
        with torch.no_grad():
            self._losses = [self.loss(y, target) for y, target in
                            zip(self._x, self._targets, strict=True)]

    def backward(self, number: int, after: Callable[[], object] = lambda: None) -> None:
        """A block's backward pass, for all micro-batches in order; the last block's first pass,
        too.

        after: called after each micro-batch.
        """
        last = number == len(self.modules) - 1
        for m in range(len(self._x)):
            x = self._x[m] if last else self._inputs[number][m]
            # the last block runs once: there is nothing to repeat
            again = nullcontext() if last else replay_routing(self._tapes[number][m])
            x = x.detach().requires_grad_(number > 0 and x.is_floating_point())
            with (torch.enable_grad(), self.randomness(m, number), again,
                  unchanged_buffers(self.modules[number], [] if last else self._moving[number])):
                y, own = self._call(number, x)
                if last:
                    y = self.loss(y, self._targets[m])
                    self._losses.append(y.detach())
                    self._add_balance(m, own)
            ends = [(y, None if last else self._gradients[m]), (own, None)]
            ends = [(end, gradient) for end, gradient in ends if end is not None
                    and end.requires_grad and (end.dim() == 0 or gradient is not None)]
            if ends:
                torch.autograd.backward([end for end, _ in ends], [given for _, given in ends])
            after()
            self._gradients[m] = x.grad
            if last:
                self._x[m] = x.detach().new_empty(0)
            else:
                self._inputs[number][m] = self._tapes[number][m] = None

    def _call(self, number: int, x: Tensor) -> tuple[Tensor, Tensor | None]:
        given = self.modules[number](x)
        y, own = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if not isinstance(y, Tensor) or not (own is None
                                             or isinstance(own, Tensor) and own.dim() == 0):
            raise ValueError(f"block {number} ({type(self.modules[number]).__name__}) returned "
                             f"{type(given).__name__}: must be a tensor, or a tensor and a scalar "
                             "loss")
        return y, own

    def _add_balance(self, m: int, own: Tensor | None) -> None:
        if own is not None:
            before = self._balance[m]
            own = own.detach()
            self._balance[m] = own.clone() if before is None else before + own


def _buffers(module: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield (owner, name), buffer


def _values(module: nn.Module) -> dict[Place, Tensor]:
    """Copies: kernels of running statistics do not tell torch that they change them."""
    return {place: buffer.clone() for place, buffer in _buffers(module)}


@contextmanager
def unchanged_buffers(module: nn.Module, places: Sequence[Place] | None = None) -> Iterator[None]:
    """What a pass inside changes of a module's buffers is undone, such as running statistics, which
    see one of two passes. places: of those that it changes; None: of all.
    """
    if places is None:
        places = [place for place, _ in _buffers(module)]
    before = [(owner, name, owner._buffers[name]) for owner, name in places]
    for owner, name, buffer in before:
        owner._buffers[name] = buffer.clone()  # it may be saved for backward: never written again
    try:
        yield
    finally:
        for owner, name, buffer in before:
            owner._buffers[name] = buffer
