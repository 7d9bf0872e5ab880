"""Least-loaded expert parallelism (LLEP, arXiv 2601.17111): rows above a rank's share are computed
by the least loaded ranks, to which the expert's owner lends its weights for one call.

FasterMoE's shadowing is the case in which every rank borrows an expert and keeps its own rows. Both
are a table, rows of every lent expert by the rank that computes them; any table gives the same
outputs and gradients. Rows that a borrower has itself do not travel.

An owner sends each borrower one of h equal parts of the weights, and borrowers exchange the parts:
it sends an expert once, whatever h is, and takes its gradient back once.

Legend: W ranks, V experts of the group (or shards of experts), L = V / W of them on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

LEAST_GAIN = 0.05  # of the modelled time of a call that a plan must save

Counts = Sequence[Sequence[int]]  # rows by source rank and expert
Amounts = dict[int, list[int]]  # of lent experts: rows by the rank that computes them


def round_shares(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to `shares` with the sum `total` (Hagenbach-Bischoff).

    Quota total + 1: each gets the whole part of share / (sum / (total + 1)); what is left goes one
    by one to the largest share / (number + 1), the first of equal ones. Exact: floats are taken as
    the fractions they are.

    Raises: ValueError: a share < 0, none > 0, or total < 0.
    """
    exact = [Fraction(share) for share in shares]
    if total < 0 or not exact or min(exact) < 0 or not sum(exact):
        raise ValueError(f"shares {list(shares)[:8]} of {total} must be >= 0, one of them and the "
                         "total's sum > 0")
    quota = sum(exact) / (total + 1)
    given = [int(share / quota) for share in exact]
    while sum(given) > total:  # only where quotas are met exactly: the last takes one back
        met = [i for i, share in enumerate(exact) if given[i] and share == given[i] * quota]
        given[met[-1]] -= 1
    while sum(given) < total:
        first = max(range(len(exact)), key=lambda i: (exact[i] / (given[i] + 1), -i))
        given[first] += 1
    return given


@dataclass(frozen=True)
class Loan:
    """An expert that its owner lends for one call. helpers: who borrows it, ascending."""

    expert: int
    owner: int
    helpers: tuple[int, ...]


@dataclass(frozen=True)
class SpillPlan:
    """Which rank computes which rows.

    Attributes:
        counts_WV: rows by source rank and expert.
        amounts: see `Amounts`.
        loans: by expert, ascending.
    """

    counts_WV: Counts
    amounts: Mapping[int, Sequence[int]]
    loans: tuple[Loan, ...] = field(init=False)

    def __post_init__(self) -> None:
        made = []
        for expert, rows in sorted(self.amounts.items()):
            owner = self.owner(expert)
            helpers = tuple(w for w, n in enumerate(rows) if n and w != owner)
            if helpers:
                made.append(Loan(expert, owner, helpers))
        object.__setattr__(self, "loans", tuple(made))

    @property
    def ranks(self) -> int:
        """W."""
        return len(self.counts_WV)

    @property
    def local(self) -> int:
        """L."""
        return len(self.counts_WV[0]) // self.ranks

    def owner(self, expert: int) -> int:
        """The rank that stores an expert."""
        return expert // self.local

    def guests(self, rank: int) -> list[int]:
        """Experts that a rank borrows, ascending."""
        return [loan.expert for loan in self.loans if rank in loan.helpers]

    @property
    def most_guests(self) -> int:
        """The largest number of experts that a rank borrows."""
        return max(len(self.guests(rank)) for rank in range(self.ranks))

    def spread(self) -> Spread:
        """What the plan costs the busiest rank."""
        draft = _Draft(self.counts_WV)
        for loan in self.loans:
            for helper in loan.helpers:
                draft.move(loan.expert, helper, self.amounts[loan.expert][helper])
        return draft.spread()

    def flows(self, expert: int) -> list[list[int]]:
        """Rows of a lent expert by source rank and by the rank that computes them, [W][W].

        As many as possible stay where they are; the others are handed out in the order of ranks.
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
    """What the busiest rank does.

    Attributes:
        rows: that it computes, over its speed where ranks have different ones.
        travel: rows that enter or leave it in one direction of a pass.
        lending: experts' weights that it sends or receives in one direction, to borrowers and
            among them.
    """

    rows: float
    travel: float
    lending: float


class _Draft:
    """A plan in the making, with what it costs every rank.

    Attributes:
        speeds: rows that a rank computes while one of speed 1 computes one; None: all alike.
        shares: of each rank, rows that it computes where all ranks need the same time.
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
        self.helpers: dict[int, set[int]] = {}  # by expert
        total = sum(self.rows)
        self.speeds, self.shares = speeds, [-(-total // self.ranks)] * self.ranks
        if speeds is not None:
            self.shares = round_shares(speeds, total)

    def loads(self) -> Sequence[float]:
        """Time of each rank's rows, in rows of a rank of speed 1."""
        if self.speeds is None:
            return self.rows
        return [rows / speed for rows, speed in zip(self.rows, self.speeds, strict=True)]

    @property
    def busiest(self) -> float:
        """The largest load of a rank."""
        return max(self.loads())

    def at_owner(self, expert: int) -> int:
        """Rows of an expert that its owner computes."""
        if expert in self.amounts:
            return self.amounts[expert][expert // self.local]
        return self.totals[expert]

    def move(self, expert: int, helper: int, rows: int) -> None:
        """Let `helper` compute so many more rows of an expert in place of its owner."""
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
        kept = min(has, rows) - min(has, before)  # more rows that stay here
        self.arriving[rank] += rows - before - kept
        self.leaving[rank] -= kept
        self.amounts[expert][rank] = rows

    def spread(self) -> Spread:
        """See `Spread`."""
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
        row_s: of the matmuls of one row.
        travel_s: of a row that enters or leaves a rank, to its expert and back, and its
            gradient.
        lend_s: of one expert's weights, and of its gradient on the way back.
        fixed_s: of the exchanges of a call that lends at all.
    """

    row_s: float
    travel_s: float = 0.0
    lend_s: float = 0.0
    fixed_s: float = 0.0

    def seconds(self, spread: Spread) -> float:
        """Modelled time of a call: computing, travel and lending of the busiest rank."""
        lending = self.lend_s * spread.lending + self.fixed_s if spread.lending else 0.0
        return self.row_s * spread.rows + self.travel_s * spread.travel + lending


def _least_loaded(draft: _Draft, guests: int) -> Iterator[None]:
    """Longest processing time first: of the fullest rank the largest expert, as many rows as are
    above its share, to the emptiest rank that can borrow it. Yields after each move.
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
    mine = range(fullest * draft.local, (fullest + 1) * draft.local)
    for expert in sorted(mine, key=lambda e: (-draft.at_owner(e), e)):
        free = [w for w in range(draft.ranks) if draft.rows[w] < draft.shares[w]
                and (expert in draft.guests[w] or len(draft.guests[w]) < guests)]
        if free and draft.at_owner(expert):
            # of equally empty ranks the one that has most of these rows itself
            helper = min(free, key=lambda w: (loads[w], -draft.counts[w][expert], w))
            room = draft.shares[helper] - draft.rows[helper]
            return expert, helper, min(draft.at_owner(expert), above, room)
    return None


def _everywhere(draft: _Draft, guests: int) -> Iterator[None]:
    """FasterMoE: experts by decreasing load; every rank keeps its own rows. Yields after each."""
    by_load = sorted(range(len(draft.totals)), key=lambda e: (-draft.totals[e], e))
    for expert in by_load[:guests]:
        for rank, row in enumerate(draft.counts):
            if rank != expert // draft.local and row[expert]:
                draft.move(expert, rank, row[expert])
        yield


# what stands is made of loads of earlier steps (`standing`); predicted as if of this call's
_POLICIES = {"least_loaded": _least_loaded, "everywhere": _everywhere, "standing": _least_loaded}
POLICIES = ("never", *_POLICIES)


def saves(counts_WV: Counts, amounts: Mapping[int, Sequence[int]], costs: SpillCosts,
          speeds: Sequence[float] | None = None) -> bool:
    """Whether a table of who computes what saves `LEAST_GAIN` of the modelled time of a call, and
    the busiest rank computes no longer than without it.
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
    """The cheapest plan of a policy, or None where none saves `LEAST_GAIN` of the modelled time.

    The busiest rank never computes longer than without a plan, and no rank borrows more than
    `guests` experts.

    Args:
        counts_WV: rows by source rank and expert; rank i owns experts [i L, (i+1) L).
        policy: one of `POLICIES`.
        guests: experts that a rank may borrow at a time.
        speeds: of the ranks, relative to the device of `costs`; None: all 1.
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
