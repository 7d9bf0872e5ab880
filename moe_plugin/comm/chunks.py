"""Functions that reorder and exchange pieces of a tensor along dimension 0, pack several tensors
into one message, and describe messages in errors.

The all-to-all algorithms use the functions of this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm, Messages, piece_lengths
from moe_plugin.kernels import transpose_chunks


@dataclass(frozen=True)
class PackedLayout:
    """The layout of the bytes of a packed row.

    Attributes:
        parts: dtype, row shape and bytes per row of each packed tensor.
    """

    parts: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PackedLayout:
        """Return the layout of the packed rows of tensors [R, ...].

        Raises:
            ValueError: If the tensors differ in their number of rows.
        """
        if len({len(x) for x in tensors}) != 1:
            raise ValueError(
                f"tensors of lengths {[len(x) for x in tensors]} cannot be sent together; all "
                "tensors must have the same number of rows"
            )
        return cls(
            tuple((x.dtype, tuple(x.shape[1:]), math.prod(x.shape[1:]) * x.element_size())
                  for x in tensors))


def pack(tensors: Sequence[Tensor]) -> tuple[Tensor, PackedLayout]:
    """Pack the rows of several tensors [R, ...], which may have different dtypes, into one tensor
    of bytes. The function returns the bytes, uint8 [R, B], and the layout that `unpack` needs.
    """
    layout = PackedLayout.of(tensors)
    return torch.cat(
        [_as_bytes(x, size) for x, (_, _, size) in zip(tensors, layout.parts, strict=True)],
        dim=1), layout


def unpack(packed: Tensor, layout: PackedLayout) -> list[Tensor]:
    """Split packed rows, uint8 [R, B], into tensors [R, ...]. The function is the inverse of `pack`
    and accepts any number of rows.
    """
    columns = packed.split([size for _, _, size in layout.parts], dim=1)
    return [
        _from_bytes(column, dtype, shape)
        for column, (dtype, shape, _) in zip(columns, layout.parts, strict=True)
    ]


def _as_bytes(x: Tensor, size: int) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8).view(
        x.shape[0], size) if x.numel() else x.new_empty((x.shape[0], size), dtype=torch.uint8)


def _from_bytes(column: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not column.numel():
        return column.new_empty((column.shape[0], *shape), dtype=dtype)
    # `contiguous()` would not copy the column of a single row, whose offset may not be a
    # multiple of the element size.
    return column.clone(memory_format=torch.contiguous_format).view(-1).view(dtype).view(
        column.shape[0], *shape)


def reorder(x: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """Split `x` into pieces and concatenate the pieces in a different order with a single copy.

    Args:
        x: [sum(lengths), ...].
        lengths: number of rows in each piece of `x`.
        order: for each piece of the returned tensor, the index of the piece in `x`.
    """
    parts = x.split(list(lengths))
    wanted = [parts[i] for i in order if lengths[i]]
    return torch.cat(wanted) if wanted else x[:0]


def stride_copy(x: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder `outer * inner` pieces of equal length from outer-major to inner-major order with a
    single strided copy.

    On a GPU, a Triton kernel makes the copy.

    Args:
        x: tensor [outer * inner * c, ...]. Piece (o, j) of `x` becomes piece (j, o) of the result.
        outer: number of outer pieces.
        inner: number of inner pieces within each outer piece.
    """
    return x if outer == 1 or inner == 1 or not x.numel() else transpose_chunks(x, outer, inner)


def exchange_pieces(comm: Comm, sends: Iterable[tuple[int, Tensor]],
                    recvs: Iterable[tuple[int, Tensor]]) -> None:
    """Send and receive the pairs (peer, tensor [n, ...]) with `comm.send_receive`. Empty tensors
    are skipped.

    Pieces that a rank sends to itself are copied without communication.
    """
    sends, recvs = list(sends), list(recvs)
    local = [x for peer, x in sends if peer == comm.rank and x.shape[0]]
    for source, target in zip(local, [b for peer, b in recvs if peer == comm.rank and b.shape[0]],
                              strict=True):
        target.copy_(source)
    comm.send_receive([(p, x) for p, x in sends if p != comm.rank and x.numel()],
                  [(p, b) for p, b in recvs if p != comm.rank and b.numel()])


def ring(ranks: Sequence[int], rank: int) -> list[int]:
    """Return `ranks` in cyclic order, starting with the rank that follows `rank`. As a result,
    every rank starts with a different peer.
    """
    start = ranks.index(rank) + 1 if rank in ranks else 0
    return list(ranks[start:]) + list(ranks[:start])


def swap_equal(comm: Comm, ranks: Sequence[int], x: Tensor, out: Tensor) -> None:
    """Exchange pieces of equal length among `ranks`, which must include this rank.

    Args:
        comm: the group.
        ranks: ranks of the group that participate in the exchange.
        x: contiguous tensor [len(ranks) * n, ...]. Piece i is sent to `ranks[i]`.
        out: contiguous tensor [len(ranks) * n, ...]. Piece i is received from `ranks[i]`.
    """
    if not x.numel():
        return
    position, size = ranks.index(comm.rank), len(ranks)
    sources, targets = x.view(size, -1).unbind(), out.view(size, -1).unbind()
    targets[position].copy_(sources[position])
    # Every rank starts with a different peer, so that not all ranks send to the same rank at once.
    # The first message to arrive comes from the previous rank, so receives are posted in reverse
    # order.
    order = [*range(position + 1, size), *range(position)]
    comm.send_receive([(ranks[i], sources[i]) for i in order],
                  [(ranks[i], targets[i]) for i in reversed(order)])


def receive_first(comm: Comm, x: Tensor, send: Sequence[int] | None,
                  recv: Sequence[int] | None) -> Tensor:
    """Run a direct all-to-all as point-to-point messages. All receives are posted before any send.

    The arguments and the returned tensor are the same as for `Comm.all_to_all`.
    """
    even = send is None and recv is None
    send = piece_lengths(x.shape[0], comm.size, send, "all_to_all send")
    recv = piece_lengths(x.shape[0], comm.size, recv, "all_to_all receive")
    out = x.new_empty((sum(recv), *x.shape[1:]))
    if even:
        swap_equal(comm, range(comm.size), x, out)
        return out
    sources, targets = x.split(send), out.split(recv)
    peers = ring(range(comm.size), comm.rank)
    exchange_pieces(comm, [(p, sources[p]) for p in peers],
                    [(p, targets[p]) for p in peers[-2::-1] + peers[-1:]])
    return out


def ring_reduce_scatter(comm: Comm, x: Tensor) -> Tensor:
    """Sum the tensors [size * n, ...] of all ranks by sending messages around a ring, and return
    this rank's part [n, ...].

    Each rank sends (size - 1)/size of the bytes of `x`. Gloo's own reduce-scatter sums the whole
    tensor `x` on every rank and sends twice as many bytes. Part j is summed in the order of the
    ranks j+1, j+2, ..., j, modulo the number of ranks.

    With more than two ranks, a ring would round the partial sums of 16-bit values in every step, so
    that the error would grow with the number of ranks. Such values are therefore sent directly to
    the rank that sums them in float32, with the same number of messages and bytes.
    """
    length = piece_lengths(x.shape[0], comm.size, None, "reduce_scatter")[0]
    if comm.size == 1 or not x.numel():
        return x[:length].clone()
    x, size, me = x.contiguous(), comm.size, comm.rank
    if size > 2 and sum_dtype(x.dtype) != x.dtype:
        received = torch.empty_like(x)
        swap_equal(comm, range(size), x, received)
        of_ranks = received.split(length)
        return sum_of([of_ranks[rank] for rank in ring(range(size), me)])
    parts = x.split(length)
    # The sum of part j starts at rank j + 1 and reaches rank j after size - 1 messages.
    total = parts[me - 1]
    for step in range(size - 1):
        partial = torch.empty_like(total)
        comm.send_receive([((me + 1) % size, total)], [((me - 1) % size, partial)])
        total = partial.add_(parts[(me - 2 - step) % size])
    return total


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one dtype, added in order. The sum of 16-bit values is computed
    in float32 and rounded once.
    """
    first, dtype = parts[0], parts[0].dtype
    if len(parts) == 2:
        return first + parts[1]  # an operation in 16 bits computes in float32 and rounds once
    total = first.to(sum_dtype(dtype), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of several ranks are summed: float32 for bfloat16 and
    float16, otherwise `dtype`.
    """
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def sizes_of(sends: Messages, recvs: Messages) -> str:
    """Format the shapes of messages for an error message."""

    def short(items: Messages) -> str:
        shown = ", ".join(f"{peer}: {tuple(x.shape)}" for peer, x in items[:16])
        return shown + (f" and {len(items) - 16} more" if len(items) > 16 else "")

    dtype = next((x.dtype for _, x in (*sends, *recvs)), None)
    return (f"send_receive of {dtype} (send to rank {short(sends) or 'none'}; receive from rank "
            f"{short(recvs) or 'none'})")
