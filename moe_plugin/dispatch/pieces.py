"""Plans of exchanges. A plan divides rows into pieces, which are sent and computed in turn.

Rows are ordered by piece. Within a piece, rows are ordered by expert shard, and within a shard by
slot. Exact rows are divided into pieces along one of the axes in `PIECE_AXES`. If a capacity of n
slots is divided into m pieces, then piece c contains the slots from floor(n c / m) to
floor(n (c + 1) / m). Slot i therefore belongs to piece floor(((i + 1) m - 1) / n).

The sender and the receiver compute the piece of each exact row from row counts that are known to
both ranks. A table s of cumulative shares divides the n rows for each (source rank, expert,
destination rank): piece c contains the rows from floor(n s[c] / s[-1]) to floor(n s[c + 1] /
s[-1]). There are three axes.

Along the `rows` axis, every piece contains the same fraction of the rows of each expert from each
rank (Tutel). Along the `experts` axis, the local experts of each rank are assigned to the pieces in
order. A piece therefore contains all rows of a few experts (EPS-MoE).

Along the `peers` axis, the other ranks are assigned to the pieces in the order of their distance
(FasterMoE's smart schedule). Rows that stay on their rank do not need an exchange. Half of the rows
that stay on their rank are computed before the first piece arrives, and the other half while the
outputs of the last piece are sent back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.base import Overlap
from moe_plugin.dispatch.rows import inverse_permutation, positions
from moe_plugin.kernels import permute_rows
from moe_plugin.kernels.choices import slot_sources
from moe_plugin.records import DispatchPlan, ExpertRows, RowCounts, RowPlan
from moe_plugin.utils.machine import to_device

Counts = list[list[int]]  # rows by rank and local expert
Shares = Callable[[int, int], list[int]]  # (distance of ranks, local expert) to cumulative shares


@dataclass(frozen=True)
class PieceShares:
    """A rule that divides the rows of one call into pieces.

    Attributes:
        shares: function that maps the distance between two ranks and a local expert to the
            cumulative shares of the pieces.
        pieces: number of pieces.
        local: indices of the pieces whose rows stay on their rank.
    """

    shares: Shares
    pieces: int
    local: tuple[int, ...] = ()

    def parts(self, rows_WL: Counts, rank: int, outgoing: bool) -> list[Counts]:
        """Return the row counts of each piece.

        Args:
            rows_WL: row counts over all pieces, by the other rank and the receiver's local expert.
            rank: index of this rank.
            outgoing: True if this rank sends the rows, and False if this rank receives the rows.
        """
        if self.pieces == 1:
            return [rows_WL]
        parts: list[Counts] = [[] for _ in range(self.pieces)]
        for other, row in enumerate(rows_WL):
            distance = (other - rank if outgoing else rank - other) % len(rows_WL)
            piece_LP = [_divided(n, self.shares(distance, expert)) for expert, n in enumerate(row)]
            for piece in range(self.pieces):
                parts[piece].append([rows_P[piece] for rows_P in piece_LP])
        return parts


def _divided(rows: int, shares: list[int]) -> list[int]:
    # Rounded cumulative values instead of rounded parts: the parts add up to `rows`, and sender and
    # receiver compute the same parts.
    ends = [rows * share // shares[-1] for share in shares]
    return [end - start for start, end in zip(ends, ends[1:])]


def _window(number: int, items: int, index: int) -> list[int]:
    """Return the cumulative shares of item `index` in each piece when `items` items are divided
    among `number` pieces.
    """
    return [min(max(piece * items - number * index, 0), number) for piece in range(number + 1)]


def _by_rows(number: int, ranks: int, local: int) -> PieceShares:
    shares = list(range(number + 1))
    return PieceShares(lambda distance, expert: shares, number)


def _by_experts(number: int, ranks: int, local: int) -> PieceShares:
    shares_L = [_window(number, local, expert) for expert in range(local)]
    return PieceShares(lambda distance, expert: shares_L[expert], number)


def _by_peers(number: int, ranks: int, local: int) -> PieceShares:
    # rows of distance 0 stay on their rank: half of them in the first piece, half in the last one
    local_shares = [0, *[1] * (number + 1), 2]
    windows = (_window(number, ranks - 1, peer) for peer in range(ranks - 1))
    shares_W = [local_shares, *([0, *window, number] for window in windows)]
    return PieceShares(lambda distance, expert: shares_W[distance], number + 2, (0, number + 1))


PIECE_AXES: dict[str, Callable[[int, int, int], PieceShares]] = {
    "rows": _by_rows, "experts": _by_experts, "peers": _by_peers
}


def shares_along(name: str, number: int, ranks: int, local: int) -> PieceShares:
    """Return a rule that divides the rows for other ranks into `number` pieces along an axis.

    Args:
        name: name of the axis, a key of `PIECE_AXES`. With only one piece, the axis has no effect.
        number: number of pieces.
        ranks: number of ranks in the group.
        local: number of experts per rank.
    """
    return PIECE_AXES[name if number > 1 else "rows"](number, ranks, local)


class RowsPiece(Protocol):
    """The interface of a piece of rows that are sent together; see `Piece`."""

    @property
    def send(self) -> list[int]: ...

    @property
    def recv(self) -> list[int]: ...

    @property
    def local(self) -> bool: ...

    def work(self, rows_RD: Tensor, mapped: bool) -> ExpertRows: ...

    def results(self, rows_RD: Tensor, mapped: bool) -> Tensor: ...


@dataclass(frozen=True)
class Piece:
    """A piece of rows that are sent together.

    Attributes:
        send: number of rows sent to each rank.
        recv: number of rows received from each rank.
        counts: number of received rows for each local expert.
        order_R: int64 [R], the position at which each row arrives, for rows in expert-major order.
            Rows arrive ordered by source rank. None if rows arrive in expert-major order or `slots`
            is set.
        inverse_R: int64 [R], the inverse permutation of `order_R`.
        slots: number of rows for each (source rank, expert) pair, if the number is the same for all
            pairs (Tutel's flexible layout). None otherwise.
        local: True if all rows of the piece stay on their rank, on every rank.
    """

    send: list[int]
    recv: list[int]
    counts: RowCounts
    order_R: Tensor | None = None
    inverse_R: Tensor | None = None
    slots: int | None = None
    local: bool = False

    def work(self, rows_RD: Tensor, mapped: bool) -> ExpertRows:
        """Prepare received rows [R, D] in (source rank, expert) order for the experts.

        Args:
            rows_RD: [R, D], the rows in arrival order.
            mapped: if True, the experts read rows through an index and write their outputs in
                arrival order. If `mapped` is False, the rows are copied into expert-major order.
        """
        if not mapped or not self.reorders:
            return ExpertRows(self.expert_major(rows_RD), self.counts)
        order_R, inverse_R = self._orders(rows_RD.device)
        return ExpertRows(rows_RD, RowPlan(order_R, inverse_R[:, None], None, self.counts,
                                           complete=True))

    def results(self, rows_RD: Tensor, mapped: bool) -> Tensor:
        """Return the experts' outputs in arrival order of the rows, [R, D]."""
        return rows_RD if mapped and self.reorders else self.rank_major(rows_RD)

    @property
    def reorders(self) -> bool:
        """True if the expert-major order of the rows differs from their arrival order."""
        if self.slots is None:
            return self.order_R is not None
        return len(self.recv) > 1 and len(self.counts.host) > 1 and self.slots > 0

    def _orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `order_R` and `inverse_R`. With `slots`, they are computed on the device."""
        if self.slots is None:
            assert self.order_R is not None and self.inverse_R is not None
            return self.order_R, self.inverse_R
        ranks, experts = len(self.recv), len(self.counts.host)
        rows_R = torch.arange(ranks * experts * self.slots, device=device)
        order_R, inverse_R = (
            rows_R.view(*pairs, self.slots).transpose(0, 1).reshape(-1)
            for pairs in ((ranks, experts), (experts, ranks)))
        return order_R, inverse_R

    def expert_major(self, rows_RD: Tensor) -> Tensor:
        """Reorder rows [R, D] from (source rank, expert) order to (expert, source rank) order."""
        if not self.reorders:
            return rows_RD
        order_R, inverse_R = self._orders(rows_RD.device)
        return permute_rows(rows_RD, order_R, inverse_R)

    def rank_major(self, rows_RD: Tensor) -> Tensor:
        """Reorder rows with the inverse of `expert_major`."""
        if not self.reorders:
            return rows_RD
        order_R, inverse_R = self._orders(rows_RD.device)
        return permute_rows(rows_RD, inverse_R, order_R)


@dataclass(frozen=True)
class ExchangePlan(DispatchPlan):
    """The plan of an exchange. The plan describes the rows of each token and the pieces that are
    sent.

    Attributes:
        source_N: int64 [N], the routing choice to which each row belongs (`kernels.rows`). Rows are
            ordered by piece.
        position_TK: int64 [T, K*r], the row of each routing choice, or -1 if a choice has no row.
        weights_TK: [T, K*r], the gate weights, which require gradients. `weights_TK` is None if
            outputs are multiplied by the gate weights before they are sent back.
        pieces: pieces in sending order.
        even: True if, in each piece, every rank sends the same number of rows to every rank.
        complete: True if it is known that every choice has a row and that no slot is empty.
    """

    source_N: Tensor
    position_TK: Tensor
    weights_TK: Tensor | None
    pieces: tuple[RowsPiece, ...]
    even: bool
    complete: bool = False


def ragged_plan(order_N: Tensor, send_WL: Counts, recv_WL: Counts, ids_TK: Tensor,
                weights_TK: Tensor, place: Placement, overlap: Overlap) -> ExchangePlan:
    """Return a plan that sends exactly the routed rows, without padding.

    Args:
        order_N: int64 [N], the indices of the routing choices, sorted by expert shard. Choices
            without an expert are at the end.
        send_WL: row counts, indexed by destination rank and that rank's local expert.
        recv_WL: row counts, indexed by source rank and this rank's local expert.
        ids_TK: int64 [T, K*r], the expert shard of each choice.
        weights_TK: [T, K*r], the gate weight of each choice.
        place: the ranks that store each expert.
        overlap: number of pieces, and the axis along which rows are split.
    """
    # len(send_WL[0]) includes borrowed experts, so it can exceed place.local
    shares = shares_along(overlap.piece_axis, overlap.pieces, place.comm.size, len(send_WL[0]))
    total = sum(map(sum, send_WL))
    complete = total == order_N.numel()
    source_N = order_N if complete else order_N[:total]
    send_PWL = shares.parts(send_WL, place.comm.rank, True)
    recv_PWL = shares.parts(recv_WL, place.comm.rank, False)
    if shares.pieces > 1:
        source_N = source_N[order_by_piece(send_PWL, source_N)]
    pieces = tuple(
        _ragged_piece(send, recv, ids_TK.device, piece in shares.local)
        for piece, (send, recv) in enumerate(zip(send_PWL, recv_PWL, strict=True)))
    rows = sum(map(sum, recv_WL))
    position_TK = positions(source_N, ids_TK, complete)
    return ExchangePlan(rows, source_N, position_TK, weights_TK, pieces, False, complete)


def count_rows(plan: ExchangePlan, place: Placement) -> None:
    """Add the number of sent rows to the counters. In a compiled graph, no rows are counted."""
    for piece in () if torch.compiler.is_compiling() else plan.pieces:
        place.comm.counters.send_rows(piece.send, place.comm.topology, place.comm.rank)


def padded_plan(place: Placement, ids_TK: Tensor, weights_TK: Tensor, slots_TK: Tensor,
                capacity: int, number: int, sharers: int = 1) -> ExchangePlan:
    """Return a plan that sends fixed slots. The capacity is divided into nearly equal pieces.

    If several ranks divide the slots, the slots of a piece are ordered by sending rank.

    Args:
        place: the ranks that store each expert.
        ids_TK: int64 [T, K*r], the expert shard of each choice.
        weights_TK: [T, K*r], the gate weight of each choice.
        slots_TK: int64 [T, K*r], the slot of each choice within its expert shard.
        capacity: number of slots per expert shard.
        number: the number of pieces. If the capacity is smaller than the number of pieces, there
            are as many pieces as slots.
        sharers: number of ranks that have the same tokens and divide the slots among themselves.
    """
    sharer_slots = -(-capacity // sharers)
    number = max(1, min(number, sharer_slots))  # no piece may be empty
    starts = [sharer_slots * c // number for c in range(number + 1)]
    sharer_TK: Tensor | int = 0
    if sharers > 1:
        sharer_TK, slots_TK = slots_TK // max(1, sharer_slots), slots_TK % max(1, sharer_slots)
    owner_TK = torch.where(ids_TK >= 0, sharer_TK * place.virtual + ids_TK, -1)
    position_TK = slot_positions(owner_TK, slots_TK, sharers * place.virtual, starts)
    source_N = slot_sources(position_TK, sharers * sharer_slots * place.virtual)
    pieces = tuple(_even_piece(place, starts[c + 1] - starts[c]) for c in range(number))
    rows = place.comm.size * place.local * sharer_slots
    return ExchangePlan(rows, source_N, position_TK, weights_TK, pieces, True)


def _even_piece(place: Placement, slots: int) -> Piece:
    """Return a piece that contains `slots` rows from each rank for each expert shard."""
    size, local = place.comm.size, place.local
    by_rank = [slots * local] * size
    return Piece(by_rank, by_rank, RowCounts([size * slots] * local), slots=slots)


def slot_positions(owner_TK: Tensor, slots_TK: Tensor, owners: int, starts: list[int]) -> Tensor:
    """Return the row of each routing choice, int64, when rows are ordered by (piece, owner, slot).

    Args:
        owner_TK: int64, the owner (expert shard or rank) of each choice's row, or -1 if a choice
            has no row. The function returns -1 for choices without a row.
        slots_TK: int64, the slot of each choice among the slots of its owner.
        owners: number of owners.
        starts: first slot of each piece, followed by the total number of slots.
    """
    start_TK, length_TK = _slot_parts(slots_TK, starts, starts[-1])
    position_TK = start_TK * owners + owner_TK * length_TK + slots_TK - start_TK
    return torch.where(owner_TK >= 0, position_TK, -1)


def _slot_parts(slots_TK: Tensor, starts: list[int], capacity: int
                ) -> tuple[Tensor | int, Tensor | int]:
    """For each slot, return the first slot and the length of the piece that contains the slot."""
    number = len(starts) - 1
    if number == 1:
        return 0, capacity
    piece_TK = torch.div((slots_TK.clamp(min=0) + 1) * number - 1, max(1, capacity),
                         rounding_mode="floor").clamp(max=number - 1)
    # capacity * c // number, computed on the device: a table would have to be copied there
    start_TK = torch.div(capacity * piece_TK, number, rounding_mode="floor")
    end_TK = torch.div(capacity * (piece_TK + 1), number, rounding_mode="floor")
    return start_TK, end_TK - start_TK


def order_by_piece(send_PWL: list[Counts], source_N: Tensor) -> Tensor:
    """Return the permutation from expert shard order to (piece, expert shard) order."""
    device = source_N.device
    lengths_VP = to_device(send_PWL, device).flatten(1).t()
    piece_VP = torch.arange(len(send_PWL), device=device).repeat(lengths_VP.shape[0])
    # With `output_size`, the host does not wait for the device to learn the length.
    piece_N = piece_VP.repeat_interleave(lengths_VP.reshape(-1), output_size=source_N.numel())
    # stable: within a piece rows stay ordered by expert shard
    return torch.argsort(piece_N, stable=True)


def _ragged_piece(send_WL: Counts, recv_WL: Counts, device: torch.device, local: bool) -> Piece:
    counts = RowCounts([sum(column) for column in zip(*recv_WL, strict=True)])
    send, recv = [sum(row) for row in send_WL], [sum(row) for row in recv_WL]
    # from one rank, or for one expert, rows arrive in expert-major order
    if len(recv_WL) == 1 or len(recv_WL[0]) == 1:
        return Piece(send, recv, counts, local=local)
    lengths_M = to_device(recv_WL, device).view(-1)
    expert_M = torch.arange(len(recv_WL[0]), device=device).repeat(len(recv_WL))
    # With `output_size`, the host does not wait for the device to learn the length.
    expert_R = expert_M.repeat_interleave(lengths_M, output_size=counts.total)
    order_R = torch.argsort(expert_R, stable=True)
    return Piece(send, recv, counts, order_R, inverse_permutation(order_R), local=local)
