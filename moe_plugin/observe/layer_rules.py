"""Rules that detect problems in the layers of a run.

A rule computes a value for every record, decides whether these values indicate a problem, and
describes the problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_plugin.observe.history.records import LayerRecord
from moe_plugin.observe.layer_measures import (
    COLLAPSED_WAY,
    bound,
    concentration,
    is_over_bound,
    may_be_concentrated,
    ratio_of_same_experts,
    sureness,
    unchosen,
    with_loss,
    without_loss,
)

DROPPED = 0.10
SURE = 0.02  # the share of the entropy of an even choice
WAITS = 0.5  # the share of the calls
LASTED = 0.25  # share of a layer's records; shorter problems are normal at the beginning of a run
NAMED = 3  # the number of layers and steps that a title names
RECENT = 5  # the number of records of a layer that are judged together

Measure = Callable[[LayerRecord], Any]  # the number of one record, None if unknown
# the value of neighbouring records if the rule applies to them, otherwise None
Judge = Callable[[Sequence[Any]], "float | None"]


@dataclass(frozen=True)
class Episode:
    """A sequence of consecutive records to which a rule applies.

    Attributes: first, last: the first and the last step of the episode.
        begins, ends: whether the episode contains the layer's first record and its last record,
            respectively.
        records: the number of records in the episode.
        worst: the `RECENT` consecutive records in which the problem is most severe. If the episode
            contains the layer's last record, these are the last `RECENT` records instead.
        value: the value that the rule computed for `worst`.
    """

    first: int
    last: int
    begins: bool
    ends: bool
    records: int
    worst: Sequence[LayerRecord]
    value: float


def episodes(records: Sequence[LayerRecord], rule: LayerRule, *,
             past: bool = True) -> list[Episode]:
    """Return the episodes in which a rule applies to a layer. Within an episode, the rule applies
    to every group of `RECENT` consecutive records.

    past: whether to examine all records of the layer or only the last `RECENT` records.
    """
    records = records if past else records[-RECENT:]
    values: list[Any] = [None] * len(records)
    found: list[tuple[int, int, int, float]] = []  # begin, end, begin of the worst, its value
    measured = 0
    for at in _groups(records, rule.suspect):
        for i in range(max(measured, at), at + RECENT):
            values[i] = rule.measure(records[i])
        measured = at + RECENT
        value = rule.judge(values[at:at + RECENT])
        if value is None:
            continue
        begin, worst, most = at, at, value
        if found and found[-1][1] >= at:
            begin, _, worst, most = found.pop()
            if value > most or at + RECENT == len(values):
                worst, most = at, value
        found.append((begin, at + RECENT, worst, most))
    return [_episode(records, values, rule.judge, *one) for one in found]


def _groups(records: Sequence[LayerRecord], suspect: Callable[[LayerRecord], Any]
            ) -> Iterator[int]:
    """Yield the start index of each group of `RECENT` consecutive records that contains at least
    one suspect record.
    """
    begin, last = 0, len(records) - RECENT
    for at, record in enumerate(records):
        if suspect(record):
            yield from range(max(begin, at - RECENT + 1), min(at, last) + 1)
            begin = at + 1


def _episode(records: Sequence[LayerRecord], values: Sequence[Any], judge: Judge, begin: int,
             end: int, worst: int, value: float) -> Episode:
    # the window of RECENT records may begin and end with records that are fine by themselves
    inside = [i for i in range(begin, end) if judge(values[i:i + 1]) is not None]
    first, last = (inside[0], inside[-1]) if inside else (begin, end - 1)
    return Episode(records[first].step, records[last].step, begin == 0, end == len(records),
                   last - first + 1, records[worst:worst + RECENT], value)


Found = Mapping[str, Sequence[Episode]]  # by layer


def named(names: Sequence[str]) -> str:
    """Return a string with the first few names and the number of remaining names."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


@dataclass(frozen=True)
class LayerRule:
    """A rule that detects a problem in MoE layers.

    Attributes:
        suspect: a fast check that returns a truthy value for every record that would be a problem
            on its own. Groups of records without any suspect record are not examined further.
        measure: a function that computes a value for one record.
        judge: a function that decides whether consecutive records indicate a problem. It receives
            the values of `measure`, and returns the value to report, or None if there is no
            problem.
        title: a function that returns the title of a finding. If its second argument is True, the
            title is in the past tense.
        meaning: how the problem affects the run.
        remedy: the flags or settings that the user should change.
        lasted: the minimum length of a past problem, as a fraction of the layer's records. Shorter
            past problems are ignored.
    """

    name: str
    suspect: Callable[[LayerRecord], Any]
    measure: Measure
    judge: Judge
    title: Callable[[Found, bool], str]
    meaning: str
    remedy: str
    lasted: float = LASTED

    def look(self, layers: Mapping[str, Sequence[LayerRecord]], past: bool) -> tuple[Found, Found]:
        """Apply the rule to all layers, and return the current episodes and the past episodes by
        layer.

        past: whether to also search for past episodes.
        """
        now: dict[str, Sequence[Episode]] = {}
        over: dict[str, Sequence[Episode]] = {}
        for name, records in layers.items():
            found = episodes(records, self, past=past)
            if found and found[-1].ends:
                now[name] = found[-1:]
            elif kept := [e for e in found if e.records >= self.lasted * len(records)]:
                over[name] = kept
        return now, over


def _where(found: Found, past: bool) -> str:
    """Return a string that lists the affected layers. If only some steps are affected, the string
    also lists the range of these steps.
    """
    return named([_steps(name, stretches, past) for name, stretches in found.items()])


def _steps(name: str, stretches: Sequence[Episode], past: bool) -> str:
    if past:
        steps = named([f"{e.first:,} to {e.last:,}" for e in stretches])
        return f"{name} (steps {steps}, recovered)"
    (last,) = stretches
    return name if last.begins else f"{name} since step {last.first:,}"


def _at(found: Found, past: bool) -> tuple[str, Episode]:
    """Return a string with the name and steps of the most affected layer, and the worst episode of
    this layer.
    """
    name, worst = max(((name, e) for name, stretches in found.items() for e in stretches),
                      key=lambda item: item[1].value)
    return _steps(name, [worst], past), worst


def _mean(values: Iterable[Any]) -> float | None:
    known = list(values)
    if None in known or not math.isfinite(sum(known)):
        known = [v for v in known if v is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else None


def _mean_is(bad: Callable[[float], bool]) -> Judge:
    """Return a function for `LayerRule.judge`. The returned function computes the mean of the known
    values, and returns it if `bad(mean)` is true.
    """

    def judge(values: Sequence[Any]) -> float | None:
        mean = _mean(values)
        return mean if mean is not None and bad(mean) else None

    return judge


def _peak(records: Sequence[LayerRecord]) -> float:
    return _mean(r.max_over_mean for r in records) or 0.0


def _against(records: Sequence[LayerRecord]) -> str:
    """Return a string that states what the load of the busiest expert would be if all tokens chose
    the same experts, or an empty string if unknown.
    """
    top = _mean(ratio_of_same_experts(r) for r in records)
    return "" if top is None else f"{top:.1f} would mean all tokens on the same experts"


def _collapse_title(found: Found, past: bool) -> str:
    worst = next(iter(found.values()))[-1].worst
    return (f"routing {'had' if past else 'has'} collapsed in {_where(found, past)}: the busiest "
            f"expert {'had' if past else 'has'} {_peak(worst):.1f} times the mean load, where "
            f"{_against(worst)}")


def _uneven_title(found: Found, past: bool) -> str:
    where, worst = _at(found, past)
    others = f", uneven in {len(found)} layers" if len(found) > 1 else ""
    against = _against(worst.worst)
    limit = f"uneven from {bound(worst.worst[-1]):.2g} on"
    has = "had" if past else "has"
    return (f"the busiest expert {has} {_peak(worst.worst):.1f} times the mean load "
            f"({limit}{against and f', {against}'}) in {where}{others}")


def _dead(values: Sequence[tuple[int, int] | None]) -> float | None:
    """Return the number of experts that received no token in any of the records. Return None if
    every expert received a token, or if no token was routed.
    """
    last = values[-1]
    if last is None or not last[1] or None in values or len({v[0] for v in values if v}) > 1:
        return None
    (experts, bits), *others = (v for v in values if v)
    for _, more in others:
        bits &= more
    count = bits.bit_count()
    return count if 0 < count < experts else None


def _dead_title(found: Found, past: bool) -> str:
    count = sum(int(stretches[-1].value) for stretches in found.values())
    parts = [f"{e.value:.0f} in {_steps(name, stretches, past)}"
             for name, stretches in found.items() for e in stretches[-1:]]
    when = "for some time" if past else f"in the last {RECENT} records"
    return f"no token {'had' if past else 'has'} chosen {count} experts {when}: {named(parts)}"


def _drops_title(found: Found, past: bool) -> str:
    where, worst = _at(found, past)
    others = f", more than {100 * DROPPED:.0f} % in {len(found)} layers" if len(found) > 1 else ""
    return (f"{100 * worst.value:.0f} % of the choices {'were' if past else 'are'} dropped in "
            f"{where}{others}")


def _stalled(values: Sequence[tuple[float, float]]) -> float | None:
    stalls = sum([stalled for _, stalled in values])
    calls = sum([called for called, _ in values]) if stalls else 0.0
    return stalls / calls if calls and stalls > WAITS * calls else None


def _waits_title(found: Found, past: bool) -> str:
    where, worst = _at(found, past)
    return (f"{100 * worst.value:.0f} % of the calls of {where} {'waited' if past else 'wait'} for "
            "experts that are not on the device")


BALANCE_WEIGHT = "{weight of the balance loss}"  # replaced by the host's flag or setting

LAYER_RULES = (
    LayerRule(
        "collapse", may_be_concentrated, concentration, _mean_is(lambda way: way >= COLLAPSED_WAY),
        _collapse_title,
        "All other experts learn nothing, and all ranks wait for the rank with the busy experts.",
        f"set or raise a balance loss ({BALANCE_WEIGHT}), or use --moe-router sigmoid_bias; "
        "a collapsed router seldom recovers: go back to an earlier checkpoint", lasted=0.0),
    LayerRule(
        "dead_experts", lambda r: 0 in r.load, unchosen, _dead, _dead_title,
        "The weights of these experts get no gradient, but still need memory.",
        f"raise the balance loss ({BALANCE_WEIGHT}), add --moe-router-noise 1.0 or "
        "--moe-router-jitter 0.01 while training begins, or use fewer experts"),
    LayerRule(
        "drops", lambda r: (r.drop_fraction or 0) > DROPPED, lambda r: r.drop_fraction,
        _mean_is(lambda share: share > DROPPED), _drops_title,
        "A dropped choice contributes zeros, so that tokens at the end of a batch learn less.",
        "--moe-capacity-factor none drops nothing; or raise --moe-capacity-factor, or the balance "
        f"loss ({BALANCE_WEIGHT})"),
    LayerRule(
        "no_balance", is_over_bound, without_loss, _mean_is(lambda over: over >= 1),
        lambda found, past: f"the load {'was' if past else 'is'} uneven in {_where(found, past)}, "
                            "and no balance loss is set",
        "Nothing prevents all tokens from choosing the same experts.",
        f"set a balance loss ({BALANCE_WEIGHT}), or use a router that balances without a loss, "
        "--moe-router sigmoid_bias"),
    LayerRule(
        "uneven", is_over_bound, with_loss, _mean_is(lambda over: over >= 1), _uneven_title,
        "With experts on several ranks, the other ranks wait for this expert. With a capacity, its "
        "tokens are dropped.",
        f"raise the balance loss ({BALANCE_WEIGHT}), or let other ranks compute its rows: "
        "--moe-spill least_loaded"),
    LayerRule(
        "sure_router", lambda r: r.entropy is not None and r.entropy < SURE * len(r.load),
        sureness, _mean_is(lambda share: 0 <= share < SURE),
        lambda found, past: f"the router's entropy {'was' if past else 'is'} nearly 0 in "
                            f"{_where(found, past)}",
        "The scores are 1 for one expert and 0 for all others, so that the other chosen experts "
        "get no weight and no gradient.",
        "add a z-loss (--moe-losses ...,z=0.001), a lower learning rate, or "
        "--moe-router-fp32 true in a 16-bit model"),
    LayerRule(
        "waits_for_experts", lambda r: r.store.get("stalls"),
        lambda r: (r.calls or 0.0, r.store.get("stalls", 0.0)), _stalled,
        _waits_title,
        "The experts are copied while no computation runs.",
        "raise --moe-experts-cache, or fetch the next block's experts during the computation of "
        "this block: --moe-predict-experts true, or a model trained with --moe-pre-gate 1"),
)
