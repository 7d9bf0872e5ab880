"""Plans of exchanges, which divide rows into pieces that are sent and computed one after another.

Rows are ordered by piece. The rows of a piece are ordered by expert shard, and those of a shard by
slot. Exact rows are divided into pieces along an axis of `PIECE_AXES`. A capacity of n slots is
divided into m
pieces: piece c contains the slots from floor(n c / m) to floor(n (c + 1) / m), so that slot i
belongs to piece floor(((i + 1) m - 1) / n).

The sender and the receiver compute the piece of each exact row from counts that both of them know.
A table s of cumulative shares divides the n rows of each (source rank, expert, destination rank):
piece c contains the rows floor(n s[c] / s[-1]) to floor(n s[c + 1] / s[-1]). The axis is one of the
following three.

With the axis `rows`, every piece contains the same fraction of the rows of each expert from each
rank (Tutel). With the axis `experts`, the local experts of each rank are assigned to the pieces in
order, so a piece contains all rows of a few experts (EPS-MoE).

With the axis `peers`, the ranks are assigned to the pieces in the order of their distance
(FasterMoE's smart schedule). Rows that stay on their rank need no exchange. One half of them is
computed before the first piece arrives, and the other half while the results of the last piece are
returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.rows import inverse_permutation, positions
from moe_plugin.kernels import permute_rows
from moe_plugin.kernels.choices import slot_sources
from moe_plugin.records import DispatchPlan, ExpertRows, Overlap, RowCounts, RowPlan
from moe_plugin.utils.machine import to_device

Counts = list[list[int]]  # rows by rank and local expert
Shares = Callable[[int, int], list[int]]  # (distance of ranks, local expert) to cumulative shares


@dataclass(frozen=True)
class PieceShares:
    """The division of the rows of one call into pieces.

    Attributes:
        shares: a function that maps the distance of two ranks and a local expert to the cumulative
            shares of the pieces.
        pieces: the number of pieces.
        local: the pieces whose rows stay on their rank.
    """

    shares: Shares
    pieces: int
    local: tuple[int, ...] = ()

    def parts(self, rows_WL: Counts, rank: int, outgoing: bool) -> list[Counts]:
        """Return the numbers of rows of each piece.

        Args:
            rows_WL: the numbers of rows in all pieces together, by the other rank and the
                receiver's local expert.
            rank: the index of this rank.
            outgoing: True if the rows are sent to the other ranks, and False if they are received.
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
    """Return the cumulative shares of item `index` if `items` items are assigned to `number`
    pieces.
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
    """Return the division of the rows that are sent to other ranks into `number` pieces.

    Args:
        name: the axis, a key of `PIECE_AXES`. The axis has no effect with one piece.
        number: the number of pieces.
        ranks: the number of ranks of the group.
        local: the number of experts on a rank.
    """
    return PIECE_AXES[name if number > 1 else "rows"](number, ranks, local)


@dataclass(frozen=True)
class Piece:
    """A piece of rows that are sent together.

    Attributes:
        send: the number of rows sent to each rank.
        recv: the number of rows received from each rank.
        counts: the number of received rows by local expert.
        order_R: int64 [R], for each row in expert-major order, its position in the order of arrival
            (by source rank), or None if both orders are equal, or if `slots` is set.
        inverse_R: int64 [R], the inverse of `order_R`.
        slots: the number of rows of each (source rank, expert) pair, if it is the same for all
            pairs (Tutel's flexible layout). None otherwise.
        local: True if, on every rank, all rows of the piece stay on their rank.
    """

    send: list[int]
    recv: list[int]
    counts: RowCounts
    order_R: Tensor | None = None
    inverse_R: Tensor | None = None
    slots: int | None = None
    local: bool = False

    def work(self, rows_RD: Tensor, mapped: bool) -> ExpertRows:
        """Return received rows [R, D], ordered by (source rank, expert), as work for the experts.

        Args:
            rows_RD: [R, D], the rows in the order of arrival.
            mapped: True if the experts read rows through an index and write results in the order of
                arrival. If `mapped` is False, the rows are copied into expert-major order.
        """
        if not mapped or not self.reorders:
            return ExpertRows(self.expert_major(rows_RD), self.counts)
        order_R, inverse_R = self._orders(rows_RD.device)
        return ExpertRows(rows_RD, RowPlan(order_R, inverse_R[:, None], None, self.counts,
                                           complete=True))

    def results(self, rows_RD: Tensor, mapped: bool) -> Tensor:
        """Return the results of `work` in the order of arrival, [R, D]."""
        return rows_RD if mapped and self.reorders else self.rank_major(rows_RD)

    @property
    def reorders(self) -> bool:
        """Whether the expert-major order of rows differs from the order of arrival."""
        if self.slots is None:
            return self.order_R is not None
        return len(self.recv) > 1 and len(self.counts.host) > 1 and self.slots > 0

    def _orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `order_R` and `inverse_R`. Both are computed on the device if `slots` is set."""
        if self.slots is None:
            return self.order_R, self.inverse_R
        ranks, experts = len(self.recv), len(self.counts.host)
        rows_R = torch.arange(ranks * experts * self.slots, device=device)
        order_R, inverse_R = (
            rows_R.view(*pairs, self.slots).transpose(0, 1).reshape(-1)
            for pairs in ((ranks, experts), (experts, ranks)))
        return order_R, inverse_R

    def expert_major(self, rows_RD: Tensor) -> Tensor:
        """Reorder rows [R, D] from (source rank, expert) to (expert, source rank)."""
        if not self.reorders:
            return rows_RD
        order_R, inverse_R = self._orders(rows_RD.device)
        return permute_rows(rows_RD, order_R, inverse_R)

    def rank_major(self, rows_RD: Tensor) -> Tensor:
        """Apply the inverse of `expert_major`."""
        if not self.reorders:
            return rows_RD
        order_R, inverse_R = self._orders(rows_RD.device)
        return permute_rows(rows_RD, inverse_R, order_R)


@dataclass(frozen=True)
class ExchangePlan(DispatchPlan):
    """The plan of an exchange, which describes the rows, their pieces, and the rows of each token.

    Attributes:
        source_N: int64 [N], the choice that each row belongs to (`kernels.rows`). Rows are ordered
            by piece.
        position_TK: int64 [T, K*r], the row of each choice, or -1.
        weights_TK: [T, K*r] gate weights, differentiable, or None if results are multiplied by gate
            weights before they are returned.
        pieces: the pieces in the order in which they are sent.
        even: whether every rank sends the same number of rows to every rank, in each piece.
        complete: True if it is known that every choice has a row and no slot is empty.
    """

    source_N: Tensor
    position_TK: Tensor
    weights_TK: Tensor | None
    pieces: tuple[Piece, ...]
    even: bool
    complete: bool = False


def ragged_plan(order_N: Tensor, send_WL: Counts, recv_WL: Counts, ids_TK: Tensor,
                weights_TK: Tensor, place: Placement, overlap: Overlap) -> ExchangePlan:
    """Return the plan for exactly the rows that were routed.

    Args:
        order_N: int64 [N], the choices sorted by expert shard. Choices without an expert are last.
        send_WL: the rows by destination rank and its local expert.
        recv_WL: the rows by source rank and local expert.
        ids_TK: int64 [T, K*r], the expert shard of each choice.
        weights_TK: [T, K*r], the gate weight of each choice.
        place: the ranks that store each expert.
        overlap: the number of pieces and their axis.
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
    """Add the number of rows that are sent to the counters. Nothing is counted in a compiled
    graph."""
    for piece in () if torch.compiler.is_compiling() else plan.pieces:
        place.comm.counters.send_rows(piece.send, place.comm.topology, place.comm.rank)


def padded_plan(place: Placement, ids_TK: Tensor, weights_TK: Tensor, slots_TK: Tensor,
                capacity: int, number: int, sharers: int = 1) -> ExchangePlan:
    """Return the plan for fixed slots, with the capacity divided into nearly equal pieces.

    If several ranks share the slots, the slots of a piece are ordered by the rank that sends them.

    Args:
        place: the ranks that store each expert.
        ids_TK: int64 [T, K*r], the expert shard of each choice.
        weights_TK: [T, K*r], the gate weight of each choice.
        slots_TK: int64 [T, K*r], the slot of each choice inside its expert shard.
        capacity: the number of slots of an expert shard.
        number: the number of pieces. If there are fewer slots than pieces, the number of pieces is
            reduced to the number of slots.
        sharers: the number of ranks that have the same tokens and divide the slots.
    """
    sharer_slots = -(-capacity // sharers)
    number = max(1, min(number, sharer_slots))  # no piece may be empty
    starts = [sharer_slots * c // number for c in range(number + 1)]
    sharer_TK = 0
    if sharers > 1:
        sharer_TK, slots_TK = slots_TK // max(1, sharer_slots), slots_TK % max(1, sharer_slots)
    owner_TK = torch.where(ids_TK >= 0, sharer_TK * place.virtual + ids_TK, -1)
    position_TK = slot_positions(owner_TK, slots_TK, sharers * place.virtual, starts)
    source_N = slot_sources(position_TK, sharers * sharer_slots * place.virtual)
    pieces = tuple(_even_piece(place, starts[c + 1] - starts[c]) for c in range(number))
    rows = place.comm.size * place.local * sharer_slots
    return ExchangePlan(rows, source_N, position_TK, weights_TK, pieces, True)


def _even_piece(place: Placement, slots: int) -> Piece:
    """Return a piece with `slots` rows for each expert shard from each rank."""
    size, local = place.comm.size, place.local
    by_rank = [slots * local] * size
    return Piece(by_rank, by_rank, RowCounts([size * slots] * local), slots=slots)


def slot_positions(owner_TK: Tensor, slots_TK: Tensor, owners: int, starts: list[int]) -> Tensor:
    """Return the row of each choice, int64, if rows are ordered by (piece, owner, slot).

    Args:
        owner_TK: int64, the owner (expert shard or rank) of each choice's row. The value -1 means
            that the choice has no row. The result for such a choice is -1.
        slots_TK: int64, the slot of each choice among the slots of its owner.
        owners: the number of owners.
        starts: the first slot of each piece, followed by the number of slots.
    """
    start_TK, length_TK = _slot_parts(slots_TK, starts, starts[-1])
    position_TK = start_TK * owners + owner_TK * length_TK + slots_TK - start_TK
    return torch.where(owner_TK >= 0, position_TK, -1)


def _slot_parts(slots_TK: Tensor, starts: list[int], capacity: int) -> tuple[Tensor | int, ...]:
    """Return the first slot and the length of the piece that contains each slot."""
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
    """Return the permutation from rows by expert shard to rows by (piece, expert shard)."""
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
