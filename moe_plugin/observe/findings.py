"""What is wrong with a run, if anything: one set of rules over its records, for the host's log, for
`watch` and for the report.

Every rule looks at the last records, so that a finding goes away when its cause does; `spikes` and
`slower` look at the whole run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_plugin.observe.history.records import LayerRecord, Run, Span

RECENT = 5  # records of a layer that a rule looks at; with fewer it says nothing
MEMORY = 20  # steps before one against which a loss is compared
UNEVEN, COLLAPSED, DROPPED = 2.0, 0.75, 0.10
SURE = 0.02  # of the entropy of an even choice
SPIKE, SPIKE_NATS, SLOWER = 1.3, 0.3, 0.7
DOMINATES = 0.5  # of a step
UNDECIDED = 0.25  # of a run, at its end
DECIDED = ("settle", "keep", "restore")
NAMED = 3  # layers and steps that a title names


@dataclass(frozen=True)
class Finding:
    """One thing to look at.

    rule: its name, a key of `RULES`. title: what was seen, with numbers. meaning: what it does to
    the run. remedy: what to change, with flags. layers: where; empty: the whole run.
    """

    rule: str
    title: str
    meaning: str
    remedy: str
    layers: tuple[str, ...] = ()


def findings(run: Run, skip: Iterable[str] = ()) -> list[Finding]:
    """What the rules find, the worst kind first. skip: rules that are left out."""
    left_out = set(skip)
    return [found for name, rule in RULES.items() if name not in left_out for found in rule(run)]


def _recent(run: Run) -> Iterator[tuple[str, list[LayerRecord]]]:
    for name, records in run.layers.items():
        if len(records) >= RECENT:
            yield name, records[-RECENT:]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else None


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _per_token(record: LayerRecord) -> float | None:
    """Experts per token; None: unknown."""
    return sum(record.load) / record.tokens if record.load and record.tokens else None


def _top(records: list[LayerRecord]) -> float | None:
    """Of max_over_mean: what it would be if every token chose the same experts, E / k."""
    k, experts = _mean(_per_token(r) for r in records), len(records[-1].load)
    return experts / k if k else None


def _collapsed(records: list[LayerRecord]) -> bool:
    top, peak = _top(records), _mean(r.max_over_mean for r in records)
    return bool(top and peak and top > UNEVEN and peak >= COLLAPSED * top)


def not_finite(run: Run) -> Iterator[Finding]:
    """A loss or gradient that is no number."""
    bad = [r.step for r in run.steps
           if r.not_finite or (r.loss is not None and not math.isfinite(r.loss))]
    if bad:
        yield Finding(
            "not_finite",
            f"a loss or gradient is not finite at step {_named([f'{s:,}' for s in bad])}",
            "Such a step is skipped on all ranks; after ten in a row training stops.",
            "lower --lr or lengthen the warm-up; in fp16 lower the initial loss scale; "
            "--moe-router-fp32 true")


def collapse(run: Run) -> Iterator[Finding]:
    """Nearly all tokens choose the same few experts."""
    names = [name for name, records in _recent(run) if _collapsed(records)]
    if names:
        records = run.layers[names[0]][-RECENT:]
        peak, top = _mean(r.max_over_mean for r in records), _top(records)
        yield Finding(
            "collapse", f"routing has collapsed in {_named(names)}: the busiest expert has "
            f"{peak:.1f} times the mean load, where {top:.1f} is all tokens on the same experts",
            "The other experts learn nothing, and ranks wait for the one with the busy experts.",
            "set or raise a balance loss (--moe-losses switch=0.01), or use --moe-router "
            "sigmoid_bias; a collapsed router seldom recovers: go back to an earlier checkpoint",
            tuple(names))


def dead_experts(run: Run) -> Iterator[Finding]:
    """Experts that no token has chosen for some records."""
    dead = {}
    for name, records in _recent(run):
        loads = [r.load for r in records if r.load]
        if len(loads) == RECENT and len({len(load) for load in loads}) == 1:
            count = sum(not any(column) for column in zip(*loads, strict=True))
            if count and any(map(sum, loads)):
                dead[name] = count
    if dead:
        yield Finding(
            "dead_experts", f"no token has chosen {sum(dead.values())} experts in the last "
            f"{RECENT} records: {_named([f'{n} in {name}' for name, n in dead.items()])}",
            "Their weights get no gradient: memory without use.",
            "raise the balance loss (--moe-losses), add --moe-router-noise 1.0 or "
            "--moe-router-jitter 0.01 while training begins, or use fewer experts", tuple(dead))


def drops(run: Run) -> Iterator[Finding]:
    """Many choices find no slot."""
    dropped = {name: share for name, records in _recent(run)
               if (share := _mean(r.drop_fraction for r in records) or 0.0) > DROPPED}
    if dropped:
        worst = max(dropped, key=lambda name: dropped[name])
        yield Finding(
            "drops", f"{100 * dropped[worst]:.0f} % of the choices are dropped in {worst}"
            + (f", more than {100 * DROPPED:.0f} % in {len(dropped)} layers"
               if len(dropped) > 1 else ""),
            "A dropped choice gives zeros for that expert: tokens at the end of a batch learn less "
            "than others.",
            "--moe-capacity-factor none drops nothing; or raise --moe-capacity-factor, or balance "
            "more (--moe-losses)", tuple(dropped))


def no_balance(run: Run) -> Iterator[Finding]:
    """An uneven load, and no loss that would even it out."""
    names = [name for name, records in _recent(run)
             if all(r.load and not r.losses for r in records)
             and (_mean(r.max_over_mean for r in records) or 0) >= UNEVEN]
    if names:
        yield Finding(
            "no_balance", f"the load is uneven in {_named(names)}, and no balance loss is set",
            "Nothing keeps tokens from choosing the same experts.",
            "--moe-losses switch=0.01 (in Megatron also --moe-aux-loss-coeff 0.01), or a router "
            "that balances by itself, --moe-router sigmoid_bias", tuple(names))


def uneven(run: Run) -> Iterator[Finding]:
    """One expert has far more than its share."""
    peaks = {name: peak for name, records in _recent(run)
             if (peak := _mean(r.max_over_mean for r in records) or 0.0) >= UNEVEN
             and not _collapsed(records) and not (records[-1].load and not records[-1].losses)}
    if peaks:
        worst = max(peaks, key=lambda name: peaks[name])
        yield Finding(
            "uneven", f"the busiest expert has {peaks[worst]:.1f} times the mean load in {worst}"
            + (f", {UNEVEN:g} times or more in {len(peaks)} layers" if len(peaks) > 1 else ""),
            "With experts on several ranks the others wait for it; with a capacity its tokens are "
            "dropped.",
            "raise the balance loss (--moe-losses), or let other ranks compute its rows: "
            "--moe-spill least_loaded", tuple(peaks))


def sure_router(run: Run) -> Iterator[Finding]:
    """The router's scores are nearly one and zero."""
    names = []
    for name, records in _recent(run):
        entropy, experts = _mean(r.entropy for r in records), len(records[-1].load)
        routed = _mean(_per_token(r) for r in records) or 0.0
        if experts > 2 and routed > 1 and entropy is not None and (
                0 <= entropy < SURE * math.log(experts)):
            names.append(name)
    if names:
        yield Finding(
            "sure_router", f"the router's entropy is nearly 0 in {_named(names)}",
            "Its scores are 1 for one expert and 0 for the others: the other chosen experts get no "
            "weight and no gradient.",
            "add a z-loss (--moe-losses switch=0.01,z=0.001), a lower learning rate, or "
            "--moe-router-fp32 true in a 16-bit model", tuple(names))


def spikes(run: Run) -> Iterator[Finding]:
    """The loss jumps."""
    losses = [(r.step, r.loss) for r in run.steps if r.loss is not None and math.isfinite(r.loss)]
    seen: list[int] = []
    for index in range(MEMORY, len(losses)):
        before = statistics.median(loss for _, loss in losses[index - MEMORY:index])
        if losses[index][1] > max(SPIKE * before, before + SPIKE_NATS):
            seen.append(losses[index][0])
    if seen:
        yield Finding(
            "spikes", f"the loss jumps at step {_named([f'{step:,}' for step in seen])}",
            f"It is {SPIKE:g} times the median of the {MEMORY} records before, or more.",
            "lower --lr, clip gradients (--clip-norm, --clip-grad), add a z-loss "
            "(--moe-losses ...,z=0.001); look whether a layer's balance changed at that step")


def exchange_dominates(run: Run) -> Iterator[Finding]:
    """A recorded step is mostly exchange between ranks."""
    for (step, rank), spans in sorted(run.timelines.items()):
        total = max((s.end_s for s in spans), default=0.0)
        alone = _covered([s for s in spans if s.track == "exchange"]) - _both(spans)
        if total and alone > DOMINATES * total:
            yield Finding(
                "exchange_dominates", f"{100 * alone / total:.0f} % of step {step:,} on rank "
                f"{rank} is exchange between ranks, with no product at the same time",
                "The network, not the processors, sets the speed.",
                "--moe-parallel auto measures layouts that move less; --moe-wire bf16 halves the "
                "bytes; --moe-all-to-all auto; more tokens per step")
            return


def _covered(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of them runs."""
    total, until = 0.0, -math.inf
    for s in sorted(spans, key=lambda s: s.start_s):
        total += max(0.0, s.end_s - max(s.start_s, until))
        until = max(until, s.end_s)
    return total


def _both(spans: Sequence[Span]) -> float:
    """Seconds in which an exchange and a product run."""
    exchange = [s for s in spans if s.track == "exchange"]
    products = [s for s in spans if s.track == "matmuls"]
    return _covered(exchange) + _covered(products) - _covered([*exchange, *products])


def waits_for_experts(run: Run) -> Iterator[Finding]:
    """Calls wait for experts that are not on the device."""
    waits = {}
    for name, records in _recent(run):
        calls, stalls = (sum(values) for values in zip(*(
            (r.calls or 0.0, r.store.get("stalls", 0.0)) for r in records), strict=True))
        if calls and stalls > DOMINATES * calls:
            waits[name] = stalls / calls
    if waits:
        worst = max(waits, key=lambda name: waits[name])
        yield Finding(
            "waits_for_experts", f"{100 * waits[worst]:.0f} % of the calls of {worst} wait for "
            "experts that are not on the device",
            "They are copied while nothing else runs.",
            "raise --moe-experts-cache, or let the next block's experts be fetched while this one "
            "computes: --moe-predict-experts true, or a model trained with --moe-pre-gate 1",
            tuple(waits))


def undecided(run: Run) -> Iterator[Finding]:
    """The tuner still tries layouts at the end of a long run."""
    begin, end = run.step_range
    after = end - UNDECIDED * (end - begin)
    names = sorted({d.layer for d in run.decisions if d.event == "explore" and d.step > after}
                   - {d.layer for d in run.decisions if d.event in DECIDED and d.step > after})
    if names and end - begin >= 200:
        yield Finding(
            "undecided", f"the tuner still tries layouts in {_named(names)}",
            "Steps in which it tries are slower; it settles for each bucket of loads.",
            "--moe-parallel predicted chooses without trying; a steadier load (--moe-losses) has "
            "fewer buckets", tuple(names))


def slower(run: Run) -> Iterator[Finding]:
    """The run has become slower."""
    speeds = [r.tokens_per_s for r in run.steps if r.tokens_per_s]
    if len(speeds) < 2 * MEMORY:
        return
    parts = [statistics.median(speeds[i:i + MEMORY])
             for i in range(0, len(speeds) - MEMORY + 1, MEMORY // 2)]
    last = statistics.median(speeds[-MEMORY:])
    if last < SLOWER * max(parts):
        yield Finding(
            "slower", f"tokens per second fell from {max(parts):,.0f} to {last:,.0f}",
            f"Medians over {MEMORY} records: the best of the run, and the last.",
            "look at the balance of the layers and at the time in exchanges over the same steps; "
            "`moe-plugin doctor` on each node finds a slow one")


# the worst first
RULES: Mapping[str, Callable[[Run], Iterator[Finding]]] = {rule.__name__: rule for rule in (
    not_finite, collapse, dead_experts, drops, no_balance, uneven, sure_router, spikes,
    exchange_dominates, waits_for_experts, undecided, slower)}
