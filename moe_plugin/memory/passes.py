"""Forward and backward passes of a sequence of blocks. Each block is computed for all micro-batches
before the next block.

Only the inputs of blocks are stored. The backward pass of a block first repeats the forward pass.
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
    """The layout of tensors in a buffer of bytes.

    Attributes:
        shapes, dtypes: shapes and data types of the tensors.
        offsets: position of each tensor's first byte in the buffer.
        nbytes: size of the buffer in bytes.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> FlatLayout:
        """Return a layout that contains the given tensors in order."""
        offsets, end = [], 0
        for x in tensors:
            offsets.append(end)
            end += -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
        return cls(tuple(x.shape for x in tensors), tuple(x.dtype for x in tensors),
                   tuple(offsets), end)

    def views(self, flat_N: Tensor) -> list[Tensor]:
        """Return tensors that are views of an aligned uint8 buffer [nbytes]."""
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

    pinned_for: GPU that will access the buffer if it is allocated in pinned host memory. Optional.
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
    """Return unused memory of the C library to the operating system (glibc only).

    Without this call, glibc retains the memory of freed gradients between small allocations that
    are in use.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def absent(like: Tensor) -> Tensor:
    """Return an expanded tensor of the given shape that stores only one value. The value is NaN, or
    0 for integer types.
    """
    value = float("nan") if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


Place = tuple[nn.Module, str]  # a buffer: its module and its name


class BlockPasses:
    """The forward and backward passes of one training step, and the activations that they store.

    Args:
        modules: the blocks.
        loss: function that is called as `loss(output, target)` and returns a scalar.
        randomness: function that is called as `randomness(micro_batch, block)` and returns a
            context in which the block draws the same random numbers in every pass.
    """

    def __init__(self, modules: Sequence[nn.Module], loss: Callable[[Tensor, Any], Tensor],
                 randomness: Callable[[int, int], AbstractContextManager[None]]) -> None:
        self.modules, self.loss, self.randomness = list(modules), loss, randomness
        self._moving: list[list[Place]] = [[] for _ in modules]
        self.begin([])

    def begin(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> None:
        """Start a new step with the given inputs and targets."""
        self._x = [x for x, _ in micro_batches]  # output of the block that ran last
        self._targets = [target for _, target in micro_batches]
        self._inputs: list[list[Any]] = [[] for _ in self.modules]  # None once used
        self._tapes: list[list[Any]] = [[] for _ in self.modules]
        self._gradients: list[Tensor | None] = [None] * len(self._x)
        self._losses: list[Tensor] = []
        self._balance: list[Tensor | None] = [None] * len(self._x)

    @property
    def kept_bytes(self) -> list[int]:
        """Number of bytes that are stored for one micro-batch for the backward pass of each block.
        """
        return [sum(x.numel() * x.element_size() for x in inputs[:1]) for inputs in self._inputs]

    def end(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return, for each micro-batch, the loss and the sum of the blocks' own losses. All other
        data of the step is cleared.
        """
        balance = [torch.zeros(()) if x is None else x for x in self._balance]
        losses = tuple(self._losses)
        self.begin([])
        return losses, tuple(balance)

    def forward(self, number: int, keep: bool) -> None:
        """Run the first pass of a block for all micro-batches.

        keep: whether to store the inputs for the backward pass. Raises: ValueError: If the block
            returned an invalid value.
        """
        module = self.modules[number]
        before = _values(module) if keep else {}
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
        """Compute the losses from the outputs of the last block without a backward pass."""
        with torch.no_grad():
            self._losses = [self.loss(y, target) for y, target in
                            zip(self._x, self._targets, strict=True)]

    def backward(self, number: int, after: Callable[[], object] = lambda: None) -> None:
        """Run the backward pass of a block for all micro-batches in order.

        For the last block, this includes the first forward pass.

        after: function that is called after each micro-batch.
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


def _values(module: nn.Module) -> dict[Place, Tensor]:
    """Copy the buffers. Version counters cannot be used to detect changes, because some kernels
    update statistics without increasing them.
    """
    return {place: buffer.clone() for place, buffer in _buffers(module)}


@contextmanager
def unchanged_buffers(module: nn.Module, places: Sequence[Place] | None = None) -> Iterator[None]:
    """Restore a module's buffers at the end of the context.

    For example, running statistics must be updated by only one of two passes.

    Args:
        module: the module.
        places: pairs of the module that owns a buffer to restore and the name of the buffer.
            Defaults to all buffers of the module.
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
