"""Plans of an exchange: rows in pieces that travel and are computed one after another.

Rows lie piece after piece, within a piece by expert shard, within a shard in slot order. Exact rows
fall into pieces as `piece_axes` says; of a capacity n slot i goes to piece floor(((i + 1) m - 1) /
n) of m, which gives piece c the slots from floor(n c / m) to floor(n (c + 1) / m).

How rows are shared out over the pieces that travel one after another: by rows, experts or peers.

Which row falls into which piece follows from counts that sender and receiver both know: the n rows
of every (source rank, expert, destination rank) are shared out over the pieces by a table of
cumulative shares, and piece c takes rows floor(n s[c] / s[-1]) to floor(n s[c + 1] / s[-1]).

rows: as many of each expert from each rank in every piece (Tutel).
experts: each rank's local experts one after another (EPS-MoE), so that a piece has few of them with
all their rows.
peers: ranks in the order of their distance (FasterMoE's smart schedule). What stays on its rank
needs no exchange: one half is computed before the first piece arrives, the other while the last one
travels back.
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

Counts = list[list[int]]  # rows by (rank, its local expert)
Shares = Callable[[int, int], list[int]]  # (distance of the ranks, local expert) to cumulative ones


@dataclass(frozen=True)
class PieceShares:
    """Pieces of one call's rows.

    Attributes:
        shares: see the module.
        pieces: their number.
        local: pieces whose rows stay on their rank.
    """

    shares: Shares
    pieces: int
    local: tuple[int, ...] = ()

    def parts(self, rows_WL: Counts, rank: int, outgoing: bool) -> list[Counts]:
        """Rows of every piece.

        Args:
            rows_WL: of all pieces together, by the other rank and the receiver's local expert.
            rank: this rank.
            outgoing: rows go to the other ranks, instead of coming from them.
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
    ends = [rows * share // shares[-1] for share in shares]
    return [end - start for start, end in zip(ends, ends[1:])]


def _window(number: int, items: int, index: int) -> list[int]:
    """Cumulative shares of item `index` of `items`, which `number` pieces take one after another.
    """
    return [min(max(piece * items - number * index, 0), number) for piece in range(number + 1)]


def _by_rows(number: int, ranks: int, local: int) -> PieceShares:
    shares = list(range(number + 1))
    return PieceShares(lambda distance, expert: shares, number)


def _by_experts(number: int, ranks: int, local: int) -> PieceShares:
    shares_L = [_window(number, local, expert) for expert in range(local)]
    return PieceShares(lambda distance, expert: shares_L[expert], number)


def _by_peers(number: int, ranks: int, local: int) -> PieceShares:
    here = [0, *[1] * (number + 1), 2]
    shares_W = [here, *([0, *window, number] for window in
                        (_window(number, ranks - 1, peer) for peer in range(ranks - 1)))]
    return PieceShares(lambda distance, expert: shares_W[distance], number + 2, (0, number + 1))


PIECE_AXES: dict[str, Callable[[int, int, int], PieceShares]] = {
    "rows": _by_rows, "experts": _by_experts, "peers": _by_peers
}


def shares_along(name: str, number: int, ranks: int, local: int) -> PieceShares:
    """How rows fall into `number` pieces that travel.

    Args:
        name: in `PIECE_AXES`; without effect for one piece.
        ranks: of the group.
        local: experts of a rank.
    """
    return PIECE_AXES[name if number > 1 else "rows"](number, ranks, local)


@dataclass(frozen=True)
class Piece:
    """Rows that travel together.

    Attributes:
        send, recv: rows by rank.
        counts: rows by local expert.
        order_R, inverse_R: int64 [R], from source-rank-major to expert-major rows; None where both
            are the same, or where `slots` says how.
        slots: rows of every (source rank, expert) pair where all have as many (Tutel's flexible
            layout); None: see order_R.
        local: on every rank the rows stay there.
    """

    send: list[int]
    recv: list[int]
    counts: RowCounts
    order_R: Tensor | None = None
    inverse_R: Tensor | None = None
    slots: int | None = None
    local: bool = False

    def work(self, rows_RD: Tensor, mapped: bool) -> ExpertRows:
        """Rows [R, D] as they arrived, by (source rank, expert), as work for the experts.

        mapped: where rows have another order, experts take them out and put results back
            themselves, without a copy here.
        """
        if not mapped or not self.reorders:
            return ExpertRows(self.expert_major(rows_RD), self.counts)
        order_R, inverse_R = self._orders(rows_RD.device)
        return ExpertRows(rows_RD, RowPlan(order_R, inverse_R[:, None], None, self.counts,
                                           complete=True))

    def results(self, rows_RD: Tensor, mapped: bool) -> Tensor:
        """Results of `work` by (source rank, expert), [R, D]."""
        return rows_RD if mapped and self.reorders else self.rank_major(rows_RD)

    @property
    def reorders(self) -> bool:
        """Whether rows by (expert, source rank) have another order than those that arrive."""
        if self.slots is None:
            return self.order_R is not None
        return len(self.recv) > 1 and len(self.counts.host) > 1 and self.slots > 0

    def _orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(order_R, inverse_R); where all pairs have as many rows, made on the device."""
        if self.slots is None:
            return self.order_R, self.inverse_R
        ranks, experts = len(self.recv), len(self.counts.host)
        rows_R = torch.arange(ranks * experts * self.slots, device=device)
        order_R, inverse_R = (
            rows_R.view(*pairs, self.slots).transpose(0, 1).reshape(-1)
            for pairs in ((ranks, experts), (experts, ranks)))
        return order_R, inverse_R

    def expert_major(self, rows_RD: Tensor) -> Tensor:
        """[R, D] rows by (source rank, expert) to rows by (expert, source rank)."""
        if not self.reorders:
            return rows_RD
        order_R, inverse_R = self._orders(rows_RD.device)
        return permute_rows(rows_RD, order_R, inverse_R)

    def rank_major(self, rows_RD: Tensor) -> Tensor:
        """The inverse of `expert_major`."""
        if not self.reorders:
            return rows_RD
        order_R, inverse_R = self._orders(rows_RD.device)
        return permute_rows(rows_RD, inverse_R, order_R)


@dataclass(frozen=True)
class ExchangePlan(DispatchPlan):
    """Rows out of this rank's tokens, the pieces in which they travel, and their way back.

    Attributes:
        source_N, position_TK: see `kernels.rows`; rows lie piece after piece.
        weights_TK: [T, K*r] gate weights, differentiable; None: results arrive weighted.
        pieces: in the order in which they travel.
        even: every rank sends every rank the same number of rows, in each piece.
        complete: every choice has a row and no slot is empty; False: perhaps not.
    """

    source_N: Tensor
    position_TK: Tensor
    weights_TK: Tensor | None
    pieces: tuple[Piece, ...]
    even: bool
    complete: bool = False


def ragged_plan(order_N: Tensor, send_WL: Counts, recv_WL: Counts, ids_TK: Tensor,
                weights_TK: Tensor, place: Placement, overlap: Overlap) -> ExchangePlan:
    """Exactly the rows that were routed, in the pieces of `overlap`.

    Args:
        order_N: int64 [T*K], choices by expert shard, those without one last.
        send_WL: rows by destination rank and its local expert.
        recv_WL: rows by source rank and local expert.
        ids_TK: int64 [T, K*r] expert shards.
        weights_TK: their gate weights.
    """
    # with borrowed experts these are more than a rank stores
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
    """Count the rows that leave; in a graph of `torch.compile` none, see `TrafficMeter`."""
    for piece in () if torch.compiler.is_compiling() else plan.pieces:
        place.comm.counters.send_rows(piece.send, place.comm.topology, place.comm.rank)


def padded_plan(place: Placement, ids_TK: Tensor, weights_TK: Tensor, slots_TK: Tensor,
                capacity: int, number: int, sharers: int = 1) -> ExchangePlan:
    """The capacity in `number` nearly equal parts; with fewer slots, in as many as there are slots.

    Within a piece slots lie by the rank that sends them, where ranks share them out.

    Args:
        ids_TK, slots_TK: int64 [T, K*r], expert shard and slot of each choice.
        weights_TK: gate weights.
        sharers: ranks with the same tokens, of which each sends as many of an expert's slots.
    """
    own = -(-capacity // sharers)
    number = max(1, min(number, own))
    starts = [own * c // number for c in range(number + 1)]
    sharer_TK = 0
    if sharers > 1:
        sharer_TK, slots_TK = slots_TK // max(1, own), slots_TK % max(1, own)
    owner_TK = torch.where(ids_TK >= 0, sharer_TK * place.virtual + ids_TK, -1)
    position_TK = slot_positions(owner_TK, slots_TK, sharers * place.virtual, starts)
    source_N = slot_sources(position_TK, sharers * own * place.virtual)
    pieces = tuple(_even_piece(place, starts[c + 1] - starts[c]) for c in range(number))
    rows = place.comm.size * place.local * own
    return ExchangePlan(rows, source_N, position_TK, weights_TK, pieces, True)


def _even_piece(place: Placement, slots: int) -> Piece:
    """A piece of `slots` rows for every expert shard from every rank."""
    size, local = place.comm.size, place.local
    by_rank = [slots * local] * size
    return Piece(by_rank, by_rank, RowCounts([size * slots] * local), slots=slots)


def slot_positions(owner_TK: Tensor, slots_TK: Tensor, owners: int, starts: list[int]) -> Tensor:
    """Row of each choice where rows lie by (piece, owner, slot), int64 like `owner_TK`; -1: none.

    Args:
        owner_TK, slots_TK: int64, who has the choice's row (-1: none) and in which of its
            slots.
        starts: first slot of each piece, and the number of slots.
    """
    start_TK, length_TK = _slot_parts(slots_TK, starts, starts[-1])
    position_TK = start_TK * owners + owner_TK * length_TK + slots_TK - start_TK
    return torch.where(owner_TK >= 0, position_TK, -1)


def _slot_parts(slots_TK: Tensor, starts: list[int], capacity: int) -> tuple[Tensor | int, ...]:
    """(first slot, length) of the part of the capacity in which each slot lies."""
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
    """Rows by expert shard to rows by (piece, expert shard), int64 [N]."""
    device = source_N.device
    lengths_VP = to_device(send_PWL, device).flatten(1).t()
    piece_VP = torch.arange(len(send_PWL), device=device).repeat(lengths_VP.shape[0])
    piece_N = piece_VP.repeat_interleave(lengths_VP.reshape(-1), output_size=source_N.numel())
    return torch.argsort(piece_N, stable=True)


def _ragged_piece(send_WL: Counts, recv_WL: Counts, device: torch.device, local: bool) -> Piece:
    counts = RowCounts([sum(column) for column in zip(*recv_WL, strict=True)])
    send, recv = [sum(row) for row in send_WL], [sum(row) for row in recv_WL]
    if len(recv_WL) == 1 or len(recv_WL[0]) == 1:
        return Piece(send, recv, counts, local=local)
    lengths_M = to_device(recv_WL, device).view(-1)
    expert_M = torch.arange(len(recv_WL[0]), device=device).repeat(len(recv_WL))
    expert_R = expert_M.repeat_interleave(lengths_M, output_size=counts.total)
    order_R = torch.argsort(expert_R, stable=True)
    return Piece(send, recv, counts, order_R, inverse_permutation(order_R), local=local)
