"""Plan how ranks compute rows of overloaded experts: least-loaded expert parallelism (LLEP, arXiv
2601.17111).

In LLEP, the least loaded ranks compute the rows that exceed another rank's share. For one call, the
rank that owns an expert lends the expert's weights to the least loaded ranks. In FasterMoE's
shadowing, every rank borrows the experts with a high load and computes its own rows of these
experts. LLEP and shadowing both create a table with the number of rows that each rank computes for
every lent expert. The outputs and gradients of the layer do not depend on this table. A borrowing
rank computes its own rows of a lent expert without sending them.

With h borrowers, the owner divides the weights into h equal parts and sends a different part to
each borrower. The borrowers then exchange their parts, so that the owner sends the weights of an
expert and receives their gradient only once, for any number of borrowers.

In names and formulas, W is the number of ranks, and V is the number of experts (or shards of
    experts) of the group. Each rank stores L = V / W experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

LEAST_GAIN = 0.05  # share of a call's modelled time that a plan must save

Counts = Sequence[Sequence[int]]  # rows by source rank and expert
Amounts = dict[int, list[int]]  # for each lent expert: rows by the rank that computes them


def round_shares(shares: Sequence[float], total: int) -> list[int]:
    """Return integers that are proportional to `shares` and sum to `total` (Hagenbach-Bischoff
    method).

    The quota is `sum / (total + 1)`. Each share first receives the integer part of `share / quota`.
    Each remaining unit is given to the share with the largest `share / (number + 1)`, where
    `number` is the integer that this share has received so far. Ties are resolved in favor of the
    first share. The computation is exact, because floating-point shares are converted to exact
    fractions.

    Raises:
        ValueError: If a share or the total is negative, or if no share is positive.
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
    """An expert that its owner lends to other ranks for one call. helpers: the ranks that borrow
    the expert, in ascending order.
    """

    expert: int
    owner: int
    helpers: tuple[int, ...]


@dataclass(frozen=True)
class SpillPlan:
    """A plan that assigns rows to the ranks that compute them.

    Attributes:
        counts_WV: number of rows by source rank and expert.
        amounts: for each lent expert, the number of rows that each rank computes.
        loans: the lent experts, sorted by index.
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
        """Number of ranks, called W."""
        return len(self.counts_WV)

    @property
    def local(self) -> int:
        """Number of experts that each rank stores, called L."""
        return len(self.counts_WV[0]) // self.ranks

    def owner(self, expert: int) -> int:
        """Return the rank that stores an expert."""
        return expert // self.local

    def guests(self, rank: int) -> list[int]:
        """Return the indices of the experts that a rank borrows, in ascending order."""
        return [loan.expert for loan in self.loans if rank in loan.helpers]

    @property
    def most_guests(self) -> int:
        """Maximum number of experts that any rank borrows."""
        return max(len(self.guests(rank)) for rank in range(self.ranks))

    def spread(self) -> Spread:
        """Return the load of the busiest rank under this plan."""
        draft = _Draft(self.counts_WV)
        for loan in self.loans:
            for helper in loan.helpers:
                draft.move(loan.expert, helper, self.amounts[loan.expert][helper])
        return draft.spread()

    def flows(self, expert: int) -> list[list[int]]:
        """For a lent expert, return the number of rows [W][W] by source rank and computing rank.

        As many rows as possible remain on their source rank. The remaining rows are distributed in
        the order of the ranks.
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
    """Load of the busiest rank under a plan.

    Attributes:
        rows: number of rows that the busiest rank computes. If ranks have different speeds, the
            number of rows is divided by the speed of the rank.
        travel: maximum number of rows that any rank sends or receives in one exchange.
        lending: maximum amount of expert weights that any rank sends or receives in one direction,
            including exchanges among borrowers, in units of one expert's weights.
    """

    rows: float
    travel: float
    lending: float


class _Draft:
    """A plan under construction, and the load of every rank under this plan.

    Attributes:
        speeds: relative speed of each rank, or None if all ranks are equally fast. A rank of speed
            1 computes one row per unit of time.
        shares: for each rank, the number of rows with which all ranks would finish at the same
            time.
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
        """Return the time that each rank needs to compute its rows. The unit is the time of one row
        on a rank of speed 1.
        """
        if self.speeds is None:
            return self.rows
        return [rows / speed for rows, speed in zip(self.rows, self.speeds, strict=True)]

    @property
    def busiest(self) -> float:
        """The largest load of any rank."""
        return max(self.loads())

    def at_owner(self, expert: int) -> int:
        """Return how many rows of an expert are computed by the rank that owns the expert."""
        if expert in self.amounts:
            return self.amounts[expert][expert // self.local]
        return self.totals[expert]

    def move(self, expert: int, helper: int, rows: int) -> None:
        """Move `rows` rows of an expert from its owner to the rank `helper`."""
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
    """Costs of moving rows and lending experts. All costs include the forward and backward passes.

    Attributes:
        row_s: time in seconds of the matmuls for one row.
        travel_s: time in seconds for one row to enter or leave a rank. The time includes the way to
            the expert, the way back, and the row's gradient.
        lend_s: time in seconds to send the weights of one expert and to return their gradient.
        fixed_s: fixed time in seconds of the additional exchanges in a call that lends at least one
            expert.
    """

    row_s: float
    travel_s: float = 0.0
    lend_s: float = 0.0
    fixed_s: float = 0.0

    def seconds(self, spread: Spread) -> float:
        """Predict the time of a call in seconds from the load of the busiest rank."""
        lending = self.lend_s * spread.lending + self.fixed_s if spread.lending else 0.0
        return self.row_s * spread.rows + self.travel_s * spread.travel + lending


def _least_loaded(draft: _Draft, guests: int) -> Iterator[None]:
    """Move rows from overloaded ranks to the least loaded ranks, with the heuristic "longest
    processing time first". The generator yields after each move.

    Each move selects the expert with the most rows on the busiest rank, and moves the rows that
    exceed this rank's share to the least loaded rank that can borrow the expert.
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
    """Lend the experts with the highest loads to all ranks (FasterMoE). The generator yields after
    each expert.

    Every rank computes its own rows of the lent experts.
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
    """Return whether an assignment of rows to ranks saves at least the fraction `LEAST_GAIN` of a
    call's time.

    Returns False if the assignment would make the busiest rank compute for longer.
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
    """Return the fastest plan of a policy, or None if no plan saves at least the fraction
    `LEAST_GAIN` of a call's time.

    With the returned plan, the busiest rank does not compute for longer than without it, and no
    rank borrows more than `guests` experts.

    Args:
        counts_WV: number of rows by source rank and expert. Rank i owns the experts with the
            indices `i L` to `(i + 1) L - 1`.
        policy: name of the policy, one of `POLICIES`.
        guests: maximum number of experts that a rank may borrow at the same time.
        speeds: speed of each rank, relative to the device for which `costs` is valid. By default,
            all ranks have speed 1.
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


@lru_cache(maxsize=8)  # many choices share a spread, because they differ in other fields
def spread_of(row: tuple[int, ...], ranks: int, costs: SpillCosts, policy: str,
              guests: int) -> Spread | None:
    """Return the load of the busiest rank if every rank sends `row[v]` rows to each expert v, or
    None if no row is spilled.
    """
    plan = plan_spill([row] * ranks, costs, policy, guests)
    return None if plan is None else plan.spread()
