"""How rows are shared out over the pieces that travel one after another: by rows, experts or peers.

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

Counts = list[list[int]]  # rows by (rank, its local expert)
Shares = Callable[[int, int], list[int]]  # (distance of the ranks, local expert) to cumulative ones


@dataclass(frozen=True)
class PieceShares:
    """Pieces of one call's rows.

    Attributes:
        shares: see the module. pieces: their number.
        local: pieces whose rows stay on their rank.
    """

    shares: Shares
    pieces: int
    local: tuple[int, ...] = ()

    def parts(self, rows_WL: Counts, rank: int, outgoing: bool) -> list[Counts]:
        """Rows of every piece.

        Args:
            rows_WL: of all pieces together, by the other rank and the receiver's local expert.
            rank: this rank. outgoing: rows go to the other ranks, instead of coming from them.
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
