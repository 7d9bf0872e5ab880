"""Least-loaded expert parallelism (LLEP, arXiv 2601.17111).

Rows beyond a rank's share are computed by the least loaded ranks, to which the owner of an expert
lends the expert's weights for one call. In FasterMoE's shadowing, every rank borrows an expert and
keeps its own rows. LLEP and shadowing both produce a table that lists, for every lent expert, how
many rows each rank computes. Any table yields the same outputs and gradients. A borrower's own rows
are not sent.

An owner sends each of h borrowers one of h equal parts of the weights, and the borrowers exchange
the parts. The owner therefore sends an expert once, whatever h is, and receives its gradient once.

Legend: W ranks, V experts of the group (or shards of experts), L = V / W experts on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

LEAST_GAIN = 0.05  # share of a call's modelled time that a plan must save

Counts = Sequence[Sequence[int]]  # rows by source rank and expert
Amounts = dict[int, list[int]]  # for each lent expert: rows by the rank that computes them


def round_shares(shares: Sequence[float], total: int) -> list[int]:
    """Return whole numbers in proportion to `shares` that sum to `total` (Hagenbach-Bischoff).

    With the quota sum / (total + 1), each share receives the whole part of share / quota. The rest
    is distributed one by one to the largest share / (number + 1), where the first of equal shares
    wins. The computation is exact: floats are converted to the fractions that they represent.

    Raises:
        ValueError: if a share or the total is negative, or if no share is positive.
    """
    exact = [Fraction(share) for share in shares]
    if total < 0 or not exact or min(exact) < 0 or not sum(exact):
        raise ValueError(f"shares {list(shares)[:8]} cannot be rounded to the total {total}. The "
                         "total and all shares must be >= 0, and at least one share must be > 0")
    quota = sum(exact) / (total + 1)
    numbers = [int(share / quota) for share in exact]
    while sum(numbers) > total:  # happens only if quotas are met exactly; the last share gives way
        met = [i for i, share in enumerate(exact) if numbers[i] and share == numbers[i] * quota]
        numbers[met[-1]] -= 1
    while sum(numbers) < total:
        first = max(range(len(exact)), key=lambda i: (exact[i] / (numbers[i] + 1), -i))
        numbers[first] += 1
    return numbers


@dataclass(frozen=True)
class Loan:
    """An expert that its owner lends for one call. helpers: borrowing ranks, ascending."""

    expert: int
    owner: int
    helpers: tuple[int, ...]


@dataclass(frozen=True)
class SpillPlan:
    """Assignment of rows to the ranks that compute them.

    Attributes:
        counts_WV: rows by source rank and expert.
        amounts: rows of each lent expert by the rank that computes them.
        loans: loans in ascending order of the expert.
    """

    counts_WV: Counts
    amounts: Mapping[int, Sequence[int]]
    loans: tuple[Loan, ...] = field(init=False)

    def __post_init__(self) -> None:
        loans = []
        for expert, rows in sorted(self.amounts.items()):
            owner = self.owner(expert)
            helpers = tuple(w for w, n in enumerate(rows) if n and w != owner)
            if helpers:
                loans.append(Loan(expert, owner, helpers))
        object.__setattr__(self, "loans", tuple(loans))

    @property
    def ranks(self) -> int:
        """W, the number of ranks."""
        return len(self.counts_WV)

    @property
    def local(self) -> int:
        """L, the number of experts on each rank."""
        return len(self.counts_WV[0]) // self.ranks

    def owner(self, expert: int) -> int:
        """Return the rank that stores an expert."""
        return expert // self.local

    def guests(self, rank: int) -> list[int]:
        """Return the experts that a rank borrows, in ascending order."""
        return [loan.expert for loan in self.loans if rank in loan.helpers]

    @property
    def most_guests(self) -> int:
        """Largest number of experts that a rank borrows."""
        return max(len(self.guests(rank)) for rank in range(self.ranks))

    def spread(self) -> Spread:
        """Return the load of the busiest rank under this plan."""
        draft = _Draft(self.counts_WV)
        for loan in self.loans:
            for helper in loan.helpers:
                draft.move(loan.expert, helper, self.amounts[loan.expert][helper])
        return draft.spread()

    def flows(self, expert: int) -> list[list[int]]:
        """Return the rows of a lent expert by source rank and computing rank, [W][W].

        As many rows as possible remain on their source rank. All other rows are distributed in the
        order of the ranks.
        """
        rows = [row[expert] for row in self.counts_WV]
        wanted = list(self.amounts[expert])
        flow = [[0] * self.ranks for _ in rows]
        for w, n in enumerate(rows):
            flow[w][w] = min(n, wanted[w])
            wanted[w] -= flow[w][w]
        target = 0
        for source, n in enumerate(rows):
            left = n - flow[source][source]
            while left:
                while not wanted[target]:
                    target += 1
                moved = min(left, wanted[target])
                flow[source][target] += moved
                wanted[target] -= moved
                left -= moved
        return flow


@dataclass(frozen=True)
class Spread:
    """Load of the busiest rank.

    Attributes:
        rows: rows that the rank computes, divided by its speed if ranks have different speeds.
        travel: rows that enter or leave the rank in one direction of a pass.
        lending: expert weights that the rank sends or receives in one direction, including
            exchanges among borrowers. The unit is one expert.
    """

    rows: float
    travel: float
    lending: float


class _Draft:
    """A plan under construction, with its cost for every rank.

    Attributes:
        speeds: rows that each rank computes in the time in which a rank of speed 1 computes one
            row. None means that all ranks are equally fast.
        shares: rows of each rank if all ranks need the same time.
    """

    def __init__(self, counts_WV: Counts, speeds: Sequence[float] | None = None) -> None:
        self.counts, self.ranks = counts_WV, len(counts_WV)
        self.local = len(counts_WV[0]) // self.ranks
        self.totals = [sum(column) for column in zip(*counts_WV, strict=True)]
        self.amounts: Amounts = {}
        starts = range(0, len(self.totals), self.local)
        self.rows = [sum(self.totals[i:i + self.local]) for i in starts]
        stay = [sum(row[i:i + self.local]) for i, row in zip(starts, counts_WV, strict=True)]
        self.arriving = [n - m for n, m in zip(self.rows, stay, strict=True)]
        self.leaving = [sum(row) - m for row, m in zip(counts_WV, stay, strict=True)]
        self.guests: list[set[int]] = [set() for _ in counts_WV]
        self.helpers: dict[int, set[int]] = {}  # borrowing ranks by expert
        total = sum(self.rows)
        self.speeds, self.shares = speeds, [-(-total // self.ranks)] * self.ranks
        if speeds is not None:
            self.shares = round_shares(speeds, total)

    def loads(self) -> Sequence[float]:
        """Return the time of each rank's rows, in units of one row on a rank of speed 1."""
        if self.speeds is None:
            return self.rows
        return [rows / speed for rows, speed in zip(self.rows, self.speeds, strict=True)]

    @property
    def busiest(self) -> float:
        """Largest load of a rank."""
        return max(self.loads())

    def at_owner(self, expert: int) -> int:
        """Return the number of rows of an expert that its owner computes."""
        if expert in self.amounts:
            return self.amounts[expert][expert // self.local]
        return self.totals[expert]

    def move(self, expert: int, helper: int, rows: int) -> None:
        """Move this many rows of an expert from its owner to `helper`."""
        owner = expert // self.local
        if expert not in self.amounts:
            self.amounts[expert] = [0] * self.ranks
            self.amounts[expert][owner] = self.totals[expert]
        self._set(expert, owner, self.amounts[expert][owner] - rows)
        self._set(expert, helper, self.amounts[expert][helper] + rows)
        self.guests[helper].add(expert)
        self.helpers.setdefault(expert, set()).add(helper)

    def _set(self, expert: int, rank: int, rows: int) -> None:
        before, has = self.amounts[expert][rank], self.counts[rank][expert]
        self.rows[rank] += rows - before
        staying = min(has, rows) - min(has, before)  # additional rows that remain on this rank
        self.arriving[rank] += rows - before - staying
        self.leaving[rank] -= staying
        self.amounts[expert][rank] = rows

    def spread(self) -> Spread:
        """Return the load of the busiest rank."""
        travel = max(max(self.arriving), max(self.leaving))
        return Spread(self.busiest, travel, self._lending())

    def _lending(self) -> float:
        first, second = [0.0] * self.ranks, [0.0] * self.ranks
        sent = [0] * self.ranks
        for expert, helpers in self.helpers.items():
            sent[expert // self.local] += 1
            for w in helpers:
                first[w] += 1 / len(helpers)
                second[w] += 1 - 1 / len(helpers)
        return max(max(first), max(sent)) + max(second)


@dataclass(frozen=True, kw_only=True)
class SpillCosts:
    """Seconds of forward and backward together.

    Attributes:
        row_s: seconds of the matrix products of one row.
        travel_s: seconds to move a row into or out of a rank, on the way to its expert and back,
            including its gradient.
        lend_s: seconds to send one expert's weights, and to return their gradient.
        fixed_s: fixed seconds of the exchanges of a call that lends at least one expert.
    """

    row_s: float
    travel_s: float = 0.0
    lend_s: float = 0.0
    fixed_s: float = 0.0

    def seconds(self, spread: Spread) -> float:
        """Return the modelled time of a call: compute, travel and lending of the busiest rank."""
        lending = self.lend_s * spread.lending + self.fixed_s if spread.lending else 0.0
        return self.row_s * spread.rows + self.travel_s * spread.travel + lending


def _least_loaded(draft: _Draft, guests: int) -> Iterator[None]:
    """Move rows by the rule "longest processing time first", and yield after each move.

    Each move takes the largest expert of the fullest rank, and as many rows as exceed the rank's
    share, to the emptiest rank that can borrow the expert.
    """
    while (move := _next_move(draft, guests)) is not None:
        draft.move(*move)
        yield


def _next_move(draft: _Draft, guests: int) -> tuple[int, int, int] | None:
    loads = draft.loads()
    fullest = loads.index(max(loads))
    above = draft.rows[fullest] - draft.shares[fullest]
    if above <= 0:
        return None
    stored = range(fullest * draft.local, (fullest + 1) * draft.local)
    for expert in sorted(stored, key=lambda e: (-draft.at_owner(e), e)):
        free = [w for w in range(draft.ranks) if draft.rows[w] < draft.shares[w]
                and (expert in draft.guests[w] or len(draft.guests[w]) < guests)]
        if free and draft.at_owner(expert):
            # of equally empty ranks, prefer the rank that already has most of these rows
            helper = min(free, key=lambda w: (loads[w], -draft.counts[w][expert], w))
            room = draft.shares[helper] - draft.rows[helper]
            return expert, helper, min(draft.at_owner(expert), above, room)
    return None


def _everywhere(draft: _Draft, guests: int) -> Iterator[None]:
    """Lend experts to all ranks by decreasing load (FasterMoE), and yield after each expert.

    Every rank keeps its own rows.
    """
    by_load = sorted(range(len(draft.totals)), key=lambda e: (-draft.totals[e], e))
    for expert in by_load[:guests]:
        for rank, row in enumerate(draft.counts):
            if rank != expert // draft.local and row[expert]:
                draft.move(expert, rank, row[expert])
        yield


# "standing" uses loads of earlier steps (`standing`). Predictions use the loads of the call itself.
_POLICIES = {"least_loaded": _least_loaded, "everywhere": _everywhere, "standing": _least_loaded}
POLICIES = ("never", *_POLICIES)


def saves(counts_WV: Counts, amounts: Mapping[int, Sequence[int]], costs: SpillCosts,
          speeds: Sequence[float] | None = None) -> bool:
    """Return whether a table of computing ranks saves at least `LEAST_GAIN` of a call's time.

    The result is False if the busiest rank would compute longer than without the table.
    """
    draft = _Draft(counts_WV, speeds)
    before = draft.spread()
    for expert, rows in amounts.items():
        for rank, moved in enumerate(rows):
            if moved and rank != expert // draft.local:
                draft.move(expert, rank, moved)
    after = draft.spread()
    return after.rows <= before.rows and (
        costs.seconds(after) < costs.seconds(before) * (1 - LEAST_GAIN))


def plan_spill(counts_WV: Counts, costs: SpillCosts, policy: str, guests: int,
               speeds: Sequence[float] | None = None) -> SpillPlan | None:
    """Return the cheapest plan of a policy, or None if no plan saves `LEAST_GAIN` of the time.

    The busiest rank never computes longer than without a plan, and no rank borrows more than
    `guests` experts.

    Args:
        counts_WV: rows by source rank and expert. Rank i owns the experts [i L, (i+1) L).
        costs: seconds of rows and loans.
        policy: one of `POLICIES`.
        guests: number of experts that a rank may borrow at a time.
        speeds: speeds of the ranks relative to the device of `costs`. Defaults to 1 for all ranks.
    """
    if policy == "never" or len(counts_WV) == 1:
        return None
    draft = _Draft(counts_WV, speeds)
    most = draft.busiest
    if most * (draft.ranks if speeds is None else sum(speeds)) <= (
            sum(draft.rows) * (1 + LEAST_GAIN)):
        return None
    best, chosen = costs.seconds(draft.spread()) * (1 - LEAST_GAIN), None
    for _ in _POLICIES[policy](draft, guests):
        spread = draft.spread()
        seconds = costs.seconds(spread)
        if seconds < best and spread.rows <= most:
            best, chosen = seconds, {e: list(rows) for e, rows in draft.amounts.items()}
    return None if chosen is None else SpillPlan(counts_WV, chosen)
