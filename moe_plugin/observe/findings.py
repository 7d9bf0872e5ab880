"""What is wrong with a run, if anything: one set of rules over its records, for the host's log, for
`watch` and for the report.

Rules about layers look at the last records, so that a finding goes away when its cause does, and at
earlier ones, of which they speak as of something that is over. `spikes` and `slower` look at the
whole run.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_plugin.observe.history.records import OWN_LOOPS, LayerRecord, RunRecord, SpanRecord
from moe_plugin.observe.layer_rules import (
    BALANCE_WEIGHT,
    DROPPED,
    LAYER_RULES,
    RECENT,
    LayerRule,
    named,
)

MEMORY = 20  # steps before one against which a loss is compared
SPIKE, SPIKE_NATS, SLOWER = 1.3, 0.3, 0.7
DOMINATES = 0.5  # of a step
UNDECIDED = 0.25  # of a run, at its end
DECIDED = ("settle", "keep", "restore")
# fairseq multiplies both weights: --moe-losses alone would take the place of 1.0
_BALANCE_WEIGHTS = {"fairseq": "--moe-gate-loss-wt", "megatron": "--moe-aux-loss-coeff",
                    "transformers": "router_aux_loss_coef", "pytorch": "losses.switch"}
# the settings of the flags in remedies, for hosts without a command line (`config` needs torch)
_SETTINGS = {
    "--moe-all-to-all": "comm.all_to_all",
    "--moe-capacity-factor": "dispatch.capacity_factor",
    "--moe-eval-capacity-factor": "dispatch.eval_capacity_factor",
    "--moe-eval-token-fraction": "dispatch.eval_token_fraction",
    "--moe-experts-cache": "experts.cache",
    "--moe-losses": "losses",
    "--moe-parallel": "parallel.mode",
    "--moe-pre-gate": "router.pre_gate",
    "--moe-predict-experts": "router.predict",
    "--moe-router": "router.name",
    "--moe-router-fp32": "router.fp32",
    "--moe-router-jitter": "router.input_jitter",
    "--moe-router-noise": "router.noise",
    "--moe-spill": "parallel.spill",
    "--moe-stats-interval": "observe.interval",
    "--moe-wire": "comm.wire",
}


@dataclass(frozen=True)
class Finding:
    """One thing to look at.

    Attributes:
        rule: its name, a key of `RULES`.
        title: what was seen, with numbers.
        meaning: what it does to the run.
        remedy: what to change, with flags.
        layers: where; empty: the whole run.
        past: it is over.
        steps: the first and the last of them; None: it belongs to no step.
    """

    rule: str
    title: str
    meaning: str
    remedy: str
    layers: tuple[str, ...] = ()
    past: bool = False
    steps: tuple[int, int] | None = None


def findings(run: RunRecord, skip: Iterable[str] = (), *, past: bool = True) -> list[Finding]:
    """What the rules find, the worst kind first, and last what is over.

    Args:
        skip: rules that are left out.
        past: False: without what layers have recovered from.
    """
    left_out = set(skip)
    found = [one for name, rule in RULES.items() if name not in left_out
             for one in (_of_layers(rule, run, past) if isinstance(rule, LayerRule) else rule(run))]
    if "drops" not in left_out:
        found += _dropped_in_validation(run)
    order = list(RULES)
    return [dataclasses.replace(one, remedy=_for_host(one.remedy, run.host)) for one in
            sorted(found, key=lambda one: (one.past, order.index(one.rule)))]


def _for_host(remedy: str, host: str) -> str:
    """A remedy with the host's own flags, or settings where the host has no command line."""
    every = "; ".join(f"{name}: {weight}" for name, weight in _BALANCE_WEIGHTS.items())
    remedy = remedy.replace(BALANCE_WEIGHT, _BALANCE_WEIGHTS.get(host, every))
    if host not in OWN_LOOPS:
        return remedy
    remedy = remedy.replace("--moe-losses ...,z=", "losses.z=")
    return re.sub(r"(--moe-[a-z0-9-]+)( (?=[\w.]))?", lambda flag: _SETTINGS.get(
        flag[1], flag[1]) + ("=" if flag[2] else ""), remedy)


def too_few(run: RunRecord) -> str:
    """Why the rules about layers could not judge a run; empty if they could."""
    layers = run.layers or _of_the_log(run)
    most = max(map(len, layers.values()), default=0)
    if most >= RECENT:
        return ""
    have = f"at most {most} of a layer" if most else "none"
    return _for_host(
        f"There are too few records of layers to judge how balanced they are: {have}, and {RECENT} "
        "are needed; train longer, or write records more often with --moe-stats-interval", run.host)


def _of_layers(rule: LayerRule, run: RunRecord, past: bool) -> Iterator[Finding]:
    now, over = rule.look(run.layers or _of_the_log(run), past)
    for found, is_past in ((now, False), (over, True)):
        if found:
            stretches = [e for of_layer in found.values() for e in of_layer]
            yield Finding(rule.name, rule.title(found, is_past), rule.meaning, rule.remedy,
                          tuple(found), is_past, (min(e.first for e in stretches),
                                                  max(e.last for e in stretches)))


def _of_the_log(run: RunRecord) -> dict[str, list[LayerRecord]]:
    """What fairseq's log says of all layers together, for a run without layer statistics."""
    name = "the mean of all layers"
    records = [LayerRecord(step=r.step, layer=name, drop_fraction=share) for r in run.steps
               if (share := r.dropped()) is not None]
    return {name: records} if records else {}


def _dropped_in_validation(run: RunRecord) -> Iterator[Finding]:
    """The last validation dropped many choices: it has a bound of its own."""
    known = [(r.step, share) for r in run.steps if (share := r.dropped("valid ")) is not None]
    if known and known[-1][1] > DROPPED:
        step, share = known[-1]
        yield Finding(
            "drops", f"{100 * share:.0f} % of the choices are dropped in validation, at step "
            f"{step:,}", "The validation loss is that of a model with fewer experts a token than "
            "in training, or none.", "--moe-capacity-factor none drops nothing; or raise "
            "--moe-eval-token-fraction, --moe-eval-capacity-factor", steps=(step, step))


def not_finite(run: RunRecord) -> Iterator[Finding]:
    """A loss or gradient that is no number."""
    bad = [r.step for r in run.steps
           if r.not_finite or (r.loss is not None and not math.isfinite(r.loss))]
    if bad:
        yield Finding(
            "not_finite",
            f"a loss or gradient is not finite at step {named([f'{s:,}' for s in bad])}",
            "Such a step is skipped on all ranks; after ten in a row training stops.",
            "lower the learning rate or lengthen the warm-up; in fp16 lower the initial loss "
            "scale; --moe-router-fp32 true", steps=(bad[0], bad[-1]))


def spikes(run: RunRecord) -> Iterator[Finding]:
    """The loss jumps."""
    losses = [(r.step, r.loss) for r in run.steps if r.loss is not None and math.isfinite(r.loss)]
    seen: list[int] = []
    for index in range(MEMORY, len(losses)):
        before = statistics.median(loss for _, loss in losses[index - MEMORY:index])
        if losses[index][1] > max(SPIKE * before, before + SPIKE_NATS):
            seen.append(losses[index][0])
    if seen:
        yield Finding(
            "spikes", f"the loss jumps at step {named([f'{step:,}' for step in seen])}",
            f"It is {SPIKE:g} times the median of the {MEMORY} records before, or more.",
            "lower the learning rate, clip gradients, add a z-loss "
            "(--moe-losses ...,z=0.001); look whether a layer's balance changed at that step",
            steps=(seen[0], seen[-1]))


def exchange_dominates(run: RunRecord) -> Iterator[Finding]:
    """A recorded step is mostly exchange between ranks."""
    for (step, rank), spans in sorted(run.timelines.items()):
        total = max((s.end_s for s in spans), default=0.0)
        products = [s for s in spans if s.track == "matmuls"]
        alone = _covered([*products, *(s for s in spans if s.track == "exchange")]
                         ) - _covered(products)
        if total and alone > DOMINATES * total:
            yield Finding(
                "exchange_dominates", f"{100 * alone / total:.0f} % of step {step:,} on rank "
                f"{rank} is exchange between ranks, with no product at the same time",
                "The network, not the processors, sets the speed.",
                "--moe-parallel auto measures layouts that move less; --moe-wire bf16 halves the "
                "bytes; --moe-all-to-all auto; more tokens per step", steps=(step, step))
            return


def _covered(spans: Sequence[SpanRecord]) -> float:
    """Seconds in which at least one of them runs."""
    total, until = 0.0, -math.inf
    for s in sorted(spans, key=lambda s: s.start_s):
        total += max(0.0, s.end_s - max(s.start_s, until))
        until = max(until, s.end_s)
    return total


def undecided(run: RunRecord) -> Iterator[Finding]:
    """The tuner still tries layouts at the end of a long run."""
    begin, end = run.step_range
    after = end - UNDECIDED * (end - begin)
    names = sorted({d.layer for d in run.decisions if d.event == "explore" and d.step > after}
                   - {d.layer for d in run.decisions if d.event in DECIDED and d.step > after})
    if names and end - begin >= 200:
        yield Finding(
            "undecided", f"the tuner still tries layouts in {named(names)}",
            "Steps in which it tries are slower; it settles for each bucket of loads.",
            "--moe-parallel predicted chooses without trying; a steadier load (--moe-losses) has "
            "fewer buckets", tuple(names), steps=(math.ceil(after), end))


def slower(run: RunRecord) -> Iterator[Finding]:
    """The run has become slower."""
    steps, speeds = zip(*known, strict=True) if (known := [
        (r.step, r.tokens_per_s) for r in run.steps if r.tokens_per_s]) else ((), ())
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
            "`moe-plugin doctor` on each node finds a slow one", steps=(steps[-MEMORY], steps[-1]))


# the worst first
_OF_RUNS: tuple[Callable[[RunRecord], Iterator[Finding]], ...] = (
    not_finite, spikes, exchange_dominates, undecided, slower)
_KNOWN = {**{rule.__name__: rule for rule in _OF_RUNS}, **{rule.name: rule for rule in LAYER_RULES}}
RULES: Mapping[str, LayerRule | Callable[[RunRecord], Iterator[Finding]]] = {
    name: _KNOWN[name] for name in (
        "not_finite", "collapse", "dead_experts", "drops", "no_balance", "uneven", "sure_router",
        "spikes", "exchange_dominates", "waits_for_experts", "undecided", "slower")}
