"""The forward and backward passes of a sequence of blocks. Each block is computed for all
micro-batches before the next block starts.

Only the blocks' inputs are stored. The backward pass of a block starts by repeating the block's
forward pass.
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

from moe_plugin.routing.counting import first_pass
from moe_plugin.routing.replay import record_routing, replay_routing
from moe_plugin.utils.machine import pinned_buffer

# Several tensors share one flat buffer, so that one copy moves all of them.
ALIGNMENT = 256  # bytes; matrix products may round differently at other alignments


@dataclass(frozen=True)
class FlatLayout:
    """The positions of several tensors in one buffer of bytes.

    Attributes:
        shapes, dtypes: shapes and dtypes of the tensors.
        offsets: offset in bytes of each tensor in the buffer.
        nbytes: size of the buffer in bytes.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> FlatLayout:
        """Return a layout in which the given tensors are stored in order."""
        offsets, end = [], 0
        for x in tensors:
            offsets.append(end)
            end += -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
        return cls(tuple(x.shape for x in tensors), tuple(x.dtype for x in tensors),
                   tuple(offsets), end)

    def views(self, flat_N: Tensor) -> list[Tensor]:
        """Return the tensors as views of an aligned uint8 buffer [nbytes]."""
        views = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            part_N = flat_N[offset:offset + shape.numel() * dtype.itemsize]
            views.append(part_N.view(dtype).view(shape))
        return views

    def fill(self, flat_N: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy tensors to their positions in the buffer."""
        with torch.no_grad():
            for view, x in zip(self.views(flat_N), tensors, strict=True):
                view.copy_(x)


def aligned_buffer(nbytes: int, device: torch.device | str,
                   pinned_for: torch.device | None = None) -> Tensor:
    """Allocate an uninitialized, aligned uint8 buffer [nbytes].

    pinned_for: GPU that will access the buffer. If `pinned_for` is passed, the buffer is allocated
    in pinned host memory. Optional.
    """
    if pinned_for is not None:
        return pinned_buffer((nbytes,), torch.uint8, pinned_for)
    if torch.device(device).type == "cpu" and nbytes:
        # not from the heap, where a small neighboring allocation could prevent the release of the
        # large buffer
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8)
    raw_N = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw_N.data_ptr() % ALIGNMENT
    return raw_N[skip:skip + nbytes]


def give_back_free_memory() -> None:
    """On systems with glibc, return unused memory of the C library to the operating system.

    Otherwise, glibc retains freed gradients that lie between small allocations still in use.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def absent(like: Tensor) -> Tensor:
    """Return a tensor that has the shape of `like` but stores only a single value, which is
    expanded. The stored value is NaN, or 0 for integer dtypes.
    """
    value = float("nan") if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


Place = tuple[nn.Module, str]  # a buffer: its module and its name


class BlockPasses:
    """The forward and backward passes of one training step, and the activations stored for them.

    Args:
        modules: the blocks.
        loss: function that returns a scalar and is called as `loss(output, target)`.
        randomness: function that is called as `randomness(micro_batch, block)` and returns a
            context in which a block draws the same random numbers in every pass.
    """

    def __init__(self, modules: Sequence[nn.Module], loss: Callable[[Tensor, Any], Tensor],
                 randomness: Callable[[int, int], AbstractContextManager[None]]) -> None:
        self.modules, self.loss, self.randomness = list(modules), loss, randomness
        self._moving: list[list[Place]] = [[] for _ in modules]
        self.begin([])

    def begin(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> None:
        """Start a new step with the given pairs of inputs and targets."""
        self._x = [x for x, _ in micro_batches]  # output of the block that ran last
        self._targets = [target for _, target in micro_batches]
        self._inputs: list[list[Any]] = [[] for _ in self.modules]  # None once used
        self._tapes: list[list[Any]] = [[] for _ in self.modules]
        self._gradients: list[Tensor | None] = [None] * len(self._x)
        self._losses: list[Tensor] = []
        self._balance: list[Tensor | None] = [None] * len(self._x)

    @property
    def kept_bytes(self) -> list[int]:
        """For each block, number of bytes stored per micro-batch for the backward pass."""
        return [sum(x.numel() * x.element_size() for x in inputs[:1]) for inputs in self._inputs]

    def end(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """For each micro-batch, return its loss and the sum of the losses returned by the blocks.
        Finally, the method clears all other data of the step.
        """
        balance = [torch.zeros(()) if x is None else x for x in self._balance]
        losses = tuple(self._losses)
        self.begin([])
        return losses, tuple(balance)

    def forward(self, number: int, keep: bool) -> None:
        """Run the first forward pass of a block for all micro-batches.

        Args:
            number: index of the block.
            keep: True if the inputs are stored for the backward pass.
        Raises:
            ValueError: If the block returned an invalid object.
        """
        module = self.modules[number]
        # Copies, because some kernels update statistics without increasing a version counter.
        before = {place: x.clone() for place, x in _buffers(module)} if keep else {}
        for m, x in enumerate(self._x):
            with (torch.no_grad(), first_pass(), self.randomness(m, number),
                  record_routing() as tape):
                y, own_loss = self._call(number, x)
            if keep:
                self._inputs[number].append(x)
                self._tapes[number].append(tape)
            self._x[m] = y
            self._add_balance(m, own_loss)
        if keep:
            # backward repeats the pass and must not change these buffers a second time
            self._moving[number] = [place for place, buffer in _buffers(module) if place not in
                                    before or not torch.equal(buffer, before[place])]

    def losses(self) -> None:
        """Compute the losses from the outputs of the last block, without a backward pass."""
        with torch.no_grad():
            self._losses = [self.loss(y, target) for y, target in
                            zip(self._x, self._targets, strict=True)]

    def backward(self, number: int, after: Callable[[], object] = lambda: None) -> None:
        """Run the backward pass of a block for all micro-batches in order.

        For the last block, this method also runs the block's only forward pass.

        after: function that is called after the backward pass of each micro-batch.
        """
        last = number == len(self.modules) - 1
        for m in range(len(self._x)):
            x = self._x[m] if last else self._inputs[number][m]
            # the last block runs only once, so there is no routing to replay
            again = nullcontext() if last else replay_routing(self._tapes[number][m])
            # the first block does not need the gradient of its input
            x = x.detach().requires_grad_(number > 0 and x.is_floating_point())
            with (torch.enable_grad(), self.randomness(m, number), again,
                  unchanged_buffers(self.modules[number], [] if last else self._moving[number])):
                y, own_loss = self._call(number, x)
                if last:
                    y = self.loss(y, self._targets[m])
                    self._losses.append(y.detach())
                    self._add_balance(m, own_loss)
            results = [(y, None if last else self._gradients[m]), (own_loss, None)]
            # scalar losses start with an implicit gradient of 1; an output without a gradient is
            # skipped, because nothing after it depends on it
            ends = [(end, gradient) for end, gradient in results if end is not None
                    and end.requires_grad and (end.dim() == 0 or gradient is not None)]
            if ends:
                given: Any = [gradient for _, gradient in ends]
                torch.autograd.backward([end for end, _ in ends], given)
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
            raise ValueError(f"block {number} ({type(self.modules[number]).__name__}) returned a "
                             f"value of type {type(given).__name__}, but it must return a tensor, "
                             "or a tensor and a scalar loss")
        return y, own

    def _add_balance(self, m: int, own_loss: Tensor | None) -> None:
        if own_loss is not None:
            before = self._balance[m]
            own_loss = own_loss.detach()
            self._balance[m] = own_loss.clone() if before is None else before + own_loss


def _buffers(module: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield (owner, name), buffer


@contextmanager
def unchanged_buffers(module: nn.Module, places: Sequence[Place] | None = None) -> Iterator[None]:
    """At the end of the context, restore a module's buffers.

    For example, if a block is computed twice, only one of the passes may update running statistics.

    Args:
        module: the module.
        places: list of buffers to restore. Each buffer is given as a pair of its module and its
            name. Defaults to all buffers of the module.
    """
    if places is None:
        places = [place for place, _ in _buffers(module)]
    before = [(owner, name, owner._buffers[name]) for owner, name in places]
    for owner, name, buffer in before:
        assert buffer is not None
        # the clone may be saved for backward, and is never written again
        owner._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for owner, name, buffer in before:
            owner._buffers[name] = buffer
