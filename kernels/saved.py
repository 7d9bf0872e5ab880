"""Control over the tensors that autograd saves: rows can be stored elsewhere or recomputed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moe_plugin.kernels.activations import transformed, wants_graph

Function = Callable[..., Tensor]


def through_recomputed(consume: Function, produce: Function, *inputs: Tensor) -> Tensor:
    """Compute `consume(produce(*inputs))`, and save only the inputs for backward.

    In backward, `produce` runs again when its output is first needed. Under torch.compile, this
    function is an ordinary call, because the compiler decides which tensors are saved.

    Args:
        consume: function that maps one tensor to the output, for example a matmul. If `consume`
            saves its argument or a view of its argument, the saved tensor is discarded and
            recomputed in backward. If `consume` saves a cast copy of its argument, the copy is not
            discarded.
        produce: inexpensive function that uses no random numbers and whose output is newly
            allocated.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transformed():
        return consume(produce(*inputs))
    value = _Produce.apply(produce, *inputs)
    node = value.grad_fn
    if node is None:  # no input needs a gradient
        return consume(value)
    # The hooks live as long as the packed tensors. They must identify the value without a reference
    # to it, or its memory would not be freed.
    storage, dtype = value.untyped_storage()._cdata, value.dtype

    def pack(saved: Tensor) -> Any:
        if saved.untyped_storage()._cdata != storage or saved.dtype != dtype:
            return saved
        return saved.size(), saved.stride(), saved.storage_offset()

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else _again(node)[0].detach().as_strided(*kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return consume(value)


def _again(node: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the recomputed output of `produce` with its autograd graph, and the inputs of this
    graph.

    The output and its graph are computed once per backward pass.
    """
    if node.made is None:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in node.saved_tensors]
        with torch.enable_grad():
            node.made = node.produce(*inputs), inputs
    return node.made


class _Produce(torch.autograd.Function):
    """An autograd function that computes `produce(*inputs)`. In backward, `produce` runs a second
    time, and the second run is differentiated.
    """

    @staticmethod
    def forward(ctx: Any, produce: Function, *inputs: Tensor) -> Tensor:
        ctx.produce, ctx.made = produce, None
        ctx.save_for_backward(*inputs)
        return produce(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        if wants_graph():
            inputs = ctx.saved_tensors
            value = ctx.produce(*inputs)
        else:
            (value, inputs), ctx.made = _again(ctx), None
        wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
        grads = iter(torch.autograd.grad(value, wanted, grad, create_graph=wants_graph()))
        return None, *(next(grads) if need else None for need in needs)


class KeptRows(Protocol):
    """Rows that are needed in backward and stored outside of autograd."""

    def rows(self) -> Tensor:
        """Return the rows [R, width], in a buffer of the same length as the original buffer. The
        contents of filler rows are arbitrary.
        """


Keep = Callable[[Tensor, Tensor], KeptRows]  # (rows [R, width], rows per expert int64 [L])


class _Buffer:
    """A stored buffer. Several saved tensors may be views of the buffer."""

    def __init__(self, kept: KeptRows) -> None:
        self._kept = kept
        self._again: Callable[[], Tensor | None] = lambda: None

    def rows(self) -> Tensor:
        """Return the rows [R, width]: the same tensor as long as it is referenced."""
        again = self._again()
        if again is None:
            with torch.no_grad():
                again = self._kept.rows()
            self._again = weakref.ref(again)
        return again


@dataclass(frozen=True)
class _View:
    """A saved tensor, described as a view of a stored buffer."""

    buffer: _Buffer
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the saved tensor."""
        return self.buffer.rows().as_strided(self.size, self.stride, self.offset)


class _Packer:
    """The pack function of autograd's hooks for saved tensors. The function decides which saved
    tensors contain rows, and stores each buffer once.
    """

    def __init__(self, keep: Callable[[Tensor], KeptRows], x_RD: Tensor,
                 widths: Collection[int], others: Collection[int]) -> None:
        self.keep, self.rows, self.widths, self.others = keep, x_RD.shape[0], widths, others
        # The input may be a part of a larger storage; only this part contains rows.
        self.input = x_RD.untyped_storage()._cdata, x_RD.storage_offset(), x_RD.shape[1]
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[_Buffer]]] = {}

    def pack(self, saved: Tensor) -> Any:
        """Return a `_View` for rows that are stored elsewhere, otherwise the tensor itself."""
        part = self._part(saved)
        if part is None:
            return saved
        start, width = part
        storage = saved.untyped_storage()
        # The weak reference also prevents that a new storage gets the address of a freed one.
        _, known = self._known.get(storage._cdata, (None, lambda: None))
        buffer = known()
        if buffer is None:
            with torch.no_grad():
                rows_RW = saved.detach().as_strided((self.rows, width), (width, 1), start)
                buffer = _Buffer(self.keep(rows_RW))
            self._known[storage._cdata] = StorageWeakRef(storage), weakref.ref(buffer)
        return _View(buffer, tuple(saved.size()), saved.stride(),
                     int(saved.storage_offset()) - start)

    def _part(self, saved: Tensor) -> tuple[int, int] | None:
        """If a tensor is a view of rows, return the view's (first element, width), else None."""
        storage = saved.untyped_storage()
        if not saved.is_floating_point() or storage._cdata in self.others or not saved.numel():
            return None
        address, first, width = self.input
        if storage._cdata == address:
            last = saved.storage_offset() + sum(
                (n - 1) * step for n, step in zip(saved.shape, saved.stride(), strict=True))
            inside = first <= saved.storage_offset() and last < first + self.rows * width
            return (int(first), width) if inside else None
        width, rest = divmod(storage.nbytes() // saved.element_size(), self.rows)
        return (0, width) if not rest and width in self.widths else None


def _unpack(packed: Any) -> Tensor:
    return packed.tensor() if isinstance(packed, _View) else packed


@contextlib.contextmanager
def rows_kept(keep: Callable[[Tensor], KeptRows], x_RD: Tensor, widths: Collection[int],
              others: Collection[Tensor | None]) -> Iterator[None]:
    """Context manager that passes the rows that autograd saves inside it to `keep`.

    Two types of tensors are treated as rows: `x_RD` [R, D], which must be contiguous, and any other
    tensor with R * w elements for some w in `widths`. In each tensor of this size that is created
    inside the context, row r must be computed from row r of x.

    others: tensors that never contain rows, regardless of their size, such as weights.
    """
    packer = _Packer(keep, x_RD, widths,
                     {t.untyped_storage()._cdata for t in others if t is not None})
    with torch.autograd.graph.saved_tensors_hooks(packer.pack, _unpack):
        yield
