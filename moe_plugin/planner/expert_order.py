"""Experts placed by who is chosen together: an order of the experts over ranks and nodes in which a
token's experts are on few of them, with the load as even as before.

A rank holds consecutive positions, a node consecutive ranks; an order says which expert is at each
position. Where a token's row is sent once to each rank or node (`planner.once`), its rows are the
ranks or nodes that its experts are on: counted exactly over recorded choices. From counts of pairs
alone they are bounded from below by moments: m choices of a token on a rank, P(m >= 1) >= E[m]^2 /
E[m^2].

The search begins at the present order, and at one that fills target after target with the experts
that are chosen with its first. It swaps two experts where that lessens rows most, until no swap
does; then it swaps some by chance and begins again, as often as `KICKS` says. First over nodes,
then over the ranks of each node. It takes no order in which a node or rank has more load than the
busiest has now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_plugin.planner.once import OnceRows

KICKS, KICK_SWAPS = 12, 3
# rows of a token that a target beyond the limit counts for: more than any order saves; and once
# more times the load beyond it, as a share of all load
OVERLOAD = 1e4
ROUNDING = 1e-12  # of a share of all load
LEAST = 1e-9  # what a swap must save
Order = tuple[int, ...]


@dataclass(frozen=True)
class CoChoices:
    """Which experts tokens of one layer chose together.

    Attributes:
        tokens: how many are counted.
        pairs_EE: tokens that chose both; on the diagonal: tokens that chose the expert.
        sets: experts of single tokens; none: pairs are all that is known.
        groups: of consecutive experts, whose members stay together (group-limited routers).
    Raises: ValueError: sizes that do not fit.
    """

    tokens: int
    pairs_EE: Sequence[Sequence[int]]
    sets: Sequence[Sequence[int]] = ()
    groups: int = 1

    def __post_init__(self) -> None:
        experts = len(self.pairs_EE)
        square = all(len(row) == experts for row in self.pairs_EE)
        if not (experts and square and 0 < self.groups and experts % self.groups == 0):
            raise ValueError(f"counts of {experts} experts in {self.groups} groups: must be a row "
                             "each, of as many, and groups of one size; record the choices again")
        if any(not 0 <= expert < experts for chosen in self.sets for expert in chosen):
            raise ValueError(f"choices of experts that are not in 0..{experts - 1}: record again")
        if not 0 < self.tokens <= sum(self.loads):
            raise ValueError(f"counts of {self.tokens} tokens: there must be some, with a choice "
                             "each; record some steps of training")

    @property
    def experts(self) -> int:
        """E."""
        return len(self.pairs_EE)

    @property
    def loads(self) -> list[int]:
        """Tokens of each expert."""
        return [row[expert] for expert, row in enumerate(self.pairs_EE)]

    def half(self, odd: bool) -> CoChoices:
        """Every second token's choices, so that what was searched on one is tried on the other."""
        return replace(self, sets=self.sets[int(odd)::2])


@dataclass(frozen=True)
class PlacedExperts:
    """An order and what it saves, on choices that the search did not see where there are some.

    Attributes:
        order: the expert at each position.
        before, after: rows of a token, see `rows_of`.
        busiest: load of the busiest rank over the mean, before and after.
    """

    order: Order
    before: OnceRows
    after: OnceRows
    busiest: tuple[float, float]

    @property
    def moves(self) -> int:
        """Experts that are at another position."""
        return sum(expert != place for place, expert in enumerate(self.order))

    def saved(self, level: str) -> float:
        """Share of the rows between `nodes` or `ranks` that are not sent any more. (Of its targets
        a token is on one already, with a chance that no order changes.)
        """
        return 1 - getattr(self.after, level) / getattr(self.before, level)


def place(choices: CoChoices, nodes: int, ranks: int, slack: float = 0.0,
          seed: int = 0) -> PlacedExperts:
    """The best order found, or the present one where that saves nothing.

    Args:
        nodes: of equally many ranks.
        ranks: of all nodes.
        slack: how much busier than the busiest now a node or rank may be, as a share.
    Raises: ValueError: experts do not fit the ranks; groups that nodes or ranks would cut anyhow.
    """
    _check(choices, nodes, ranks, slack)
    now, tried = tuple(range(choices.experts)), choices
    if len(choices.sets) > 1:
        choices, tried = choices.half(False), choices.half(True)
    order = best_order(choices, nodes, ranks, slack, seed)
    before, after = (rows_of(tried, each, nodes, ranks) for each in (now, order))
    if (after.nodes, after.ranks) >= (before.nodes, before.ranks):
        order, after = now, before
    loads = [_sums(choices.loads, each, ranks) for each in (now, order)]
    peaks = [max(sums) * len(sums) / sum(sums) for sums in loads]
    return PlacedExperts(order, before, after, (peaks[0], peaks[1]))


def rows_of(choices: CoChoices, order: Sequence[int], nodes: int, ranks: int) -> OnceRows:
    """Rows of a token to ranks and nodes, its own rank's and node's counted, and its choices."""
    count = _counted if choices.sets else _bounded
    return OnceRows(count(choices, order, ranks), count(choices, order, nodes),
                    sum(choices.loads) / choices.tokens)


def best_order(choices: CoChoices, nodes: int, ranks: int, slack: float = 0.0,
               seed: int = 0) -> Order:
    """The order in which `choices` need fewest rows between nodes, then between ranks, as far as
    the search finds; see `place`.
    """
    fits = order = tuple(range(choices.experts))
    inside = 1
    levels = [targets for targets in dict.fromkeys((nodes, ranks))
              if 1 < targets <= choices.experts]
    for targets in levels:
        order = _better(choices, order, targets, inside, slack, seed)
        inside = targets
        if all(max(_sums(choices.loads, order, each)) <= _limit(choices, each, slack)
               for each in levels):
            fits = order
    return fits


def _check(choices: CoChoices, nodes: int, ranks: int, slack: float) -> None:
    experts, groups = choices.experts, choices.groups
    if ranks % nodes or (experts % ranks and ranks % experts) or (
            experts < ranks and experts % nodes):
        raise ValueError(f"{experts} experts do not fit {ranks} ranks on {nodes} nodes: ranks must "
                         "be a multiple or a divisor, nodes a divisor of both; name others")
    for targets in (nodes, ranks):
        if groups % targets and targets % groups:
            raise ValueError(f"the router's {groups} groups of experts do not fit {targets} nodes "
                             "or ranks: must be a multiple or a divisor; name others")
    if not 0 <= slack <= 1e6:
        raise ValueError(f"slack={slack} must be a number >= 0; use 0 for a load as even as now")


def _sums(loads: Sequence[int], order: Sequence[int], targets: int) -> list[float]:
    """Load of each target; where experts are cut, of each expert."""
    each = max(1, len(order) // targets)
    return [sum(loads[e] for e in order[i:i + each]) for i in range(0, len(order), each)]


def _limit(choices: CoChoices, targets: int, slack: float) -> float:
    """Load that a target may have."""
    now = _sums(choices.loads, range(choices.experts), targets)
    return max(now) * (1 + slack) + LEAST


def _targets_of(order: Sequence[int], targets: int) -> list[int]:
    """By expert, the target that it is on."""
    found = [0] * len(order)
    for place_, expert in enumerate(order):
        found[expert] = place_ * targets // len(order)
    return found


def _counted(choices: CoChoices, order: Sequence[int], targets: int) -> float:
    on, cut = _targets_of(order, targets), max(1, targets // choices.experts)
    return cut * sum(len({on[e] for e in chosen}) for chosen in choices.sets) / len(choices.sets)


def _bounded(choices: CoChoices, order: Sequence[int], targets: int) -> float:
    """A lower bound of `_counted` by the moments of pairs."""
    on, cut = np.array(_targets_of(order, targets)), max(1, targets // choices.experts)
    pairs_EE, total = np.array(choices.pairs_EE, dtype=float), 0.0
    for target in set(on.tolist()):
        here = np.flatnonzero(on == target)
        first, second = pairs_EE[here, here].sum(), pairs_EE[np.ix_(here, here)].sum()
        total += first * first / second if second else 0.0
    return float(cut * total / choices.tokens)


# -- the search


def _better(choices: CoChoices, order: Order, targets: int, inside: int, slack: float,
            seed: int) -> Order:
    """`order` with experts swapped between `targets`, within each of the `inside` targets above."""
    experts = choices.experts
    each, size, above = experts // targets, experts // choices.groups, experts // inside
    # whole groups change places where targets have some, else experts of the same group
    unit = size if choices.groups > 1 and each % size == 0 else 1
    items = [order[i:i + unit] for i in range(0, experts, unit)]
    kinds = [(i * unit // above, i * unit // max(size, each) if unit == 1 and size < experts else 0)
             for i in range(len(items))]
    item_of = {expert: i for i, run in enumerate(items) for expert in run}
    known = [(chosen, 1.0) for chosen in choices.sets] or [
        ((e, f), float(n)) for e, row in enumerate(choices.pairs_EE) for f, n in enumerate(row)
        if f < e and n]
    seen: dict[frozenset[int], float] = {}
    for chosen, weight in known:
        key = frozenset(item_of[e] for e in chosen)
        seen[key] = seen.get(key, 0.0) + weight
    loads = np.array([sum(choices.loads[e] for e in run) for run in items], dtype=float)
    limit = _limit(choices, targets, slack) / sum(choices.loads)
    start = np.arange(len(items)) * unit // each
    found = _Search(seen, loads / loads.sum(), kinds, targets, limit).best(start, seed)
    by_target = sorted(range(len(items)), key=lambda i: (found[i], i))
    return tuple(expert for i in by_target for expert in items[i])


class _Search:
    """Swaps of items between targets. An item is an expert, or a group of them.

    Args:
        seen: sets of items, and how often each was chosen.
        loads: of the items, 1 together.
        kinds: items of one kind alone change places.
        limit: of a target's load.
    """

    def __init__(self, seen: dict[frozenset[int], float], loads: np.ndarray,
                 kinds: Sequence[object], targets: int, limit: float) -> None:
        self.loads, self.targets, self.limit = loads, targets, limit
        self.weight_S = np.array(list(seen.values())) / (sum(seen.values()) or 1.0)
        self.in_SI = np.zeros((len(seen), len(loads)))
        for row, items in enumerate(seen):
            self.in_SI[row, list(items)] = 1
        number = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
        kind_I = np.array([number[kind] for kind in kinds])
        self.alike_II = kind_I[:, None] == kind_I

    def best(self, start: np.ndarray, seed: int) -> list[int]:
        """The best targets by item that were found."""
        rng = np.random.default_rng(seed)
        best = min((self._descend(each.copy()) for each in (start, self._grown(start))),
                   key=self._cost)
        cost = self._cost(best)
        for _ in range(KICKS):
            tried = self._descend(self._kicked(best, rng))
            if self._cost(tried) < cost - LEAST:
                best, cost = tried, self._cost(tried)
        return [int(target) for target in best]

    def _grown(self, start: np.ndarray) -> np.ndarray:
        """Each target grows from one item, by what is chosen most with those that it has; of a kind
        it gets as many items as in `start`.
        """
        near_II = (self.in_SI.T * self.weight_S) @ self.in_SI
        at_I, left_I = np.full_like(start, -1), np.ones(len(start), dtype=bool)
        for first in range(len(start)):
            for target in np.unique(start[self.alike_II[first]]) if left_I[first] else ():
                alike_I = self.alike_II[first]
                mine_I = np.zeros(len(start))
                for _ in range(int((alike_I & (start == target)).sum())):
                    # the first one by all that it is chosen with and that is left
                    value_I = near_II @ (mine_I if mine_I.any() else alike_I & left_I)
                    chosen = int(np.where(alike_I & left_I, value_I, -1.0).argmax())
                    at_I[chosen], left_I[chosen], mine_I[chosen] = target, False, 1.0
        return at_I

    def _kicked(self, at_I: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        at_I = at_I.copy()
        for _ in range(KICK_SWAPS):
            others = np.argwhere(self.alike_II & (at_I[:, None] != at_I))
            if len(others):
                one, other = others[rng.integers(len(others))]
                at_I[[one, other]] = at_I[[other, one]]
        return at_I

    def _descend(self, at_I: np.ndarray) -> np.ndarray:
        while True:
            change_II = self._changes(at_I)
            one, other = np.unravel_index(change_II.argmin(), change_II.shape)
            if change_II[one, other] >= -LEAST:
                return at_I
            at_I[[one, other]] = at_I[[other, one]]

    def _on(self, at_I: np.ndarray) -> np.ndarray:
        return (at_I[:, None] == np.arange(self.targets)).astype(float)

    def _over(self, load: np.ndarray) -> np.ndarray:
        beyond = load - self.limit
        return OVERLOAD * np.where(beyond > ROUNDING, 1 + beyond, 0.0)

    def _cost(self, at_I: np.ndarray) -> float:
        on_IN = self._on(at_I)
        rows = self.weight_S @ ((self.in_SI @ on_IN) > 0).sum(1)
        return float(rows + self._over(self.loads @ on_IN).sum())

    def _changes(self, at_I: np.ndarray) -> np.ndarray:
        """What each swap of two items adds to the cost. Of a set that has one of them it takes a
        target away where that item is alone there, and adds one where the other target is new; a
        set that has both stays as it is.
        """
        on_IN = self._on(at_I)
        count_SN = self.in_SI @ on_IN
        mine_SI = self.in_SI * self.weight_S[:, None]
        alone_SI = mine_SI * (count_SN[:, at_I] == 1)
        adds_II = (mine_SI.T @ (count_SN == 0))[:, at_I]  # item to the other's target
        both_II = alone_SI.T @ self.in_SI
        leaves_I = alone_SI.sum(0)
        change_II = (adds_II + adds_II.T - leaves_I[:, None] - leaves_I + both_II + both_II.T)
        load_I = (self.loads @ on_IN)[at_I]
        moved_II = load_I[:, None] - self.loads[:, None] + self.loads
        over_II = self._over(moved_II) - self._over(load_I)[:, None]
        change_II += over_II + over_II.T
        change_II[~self.alike_II | (at_I[:, None] == at_I)] = np.inf
        return change_II
