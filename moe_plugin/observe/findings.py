"""Rules that detect problems in a run by examining its records.

The training log, the live view and the report all use these rules. Rules about layers report a
current problem based on the latest records of each layer, so a finding disappears once its cause is
fixed. Problems that occur only in earlier records are reported as past problems. The rules `spikes`
and `slower` examine the whole run.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_plugin.observe.history.records import OWN_LOOPS, LayerRecord, RunRecord, SpanRecord
from moe_plugin.observe.layer_rules import (
    BALANCE_WEIGHT,
    DROPPED,
    LAYER_RULES,
    RECENT,
    LayerRule,
    named,
)

MEMORY = 20  # the number of earlier steps with which a loss is compared
SPIKE, SPIKE_NATS, SLOWER = 1.3, 0.3, 0.7
DOMINATES = 0.5  # the share of a step's time
UNDECIDED = 0.25  # the last share of a run, in which the tuner should have settled
DECIDED = ("settle", "keep", "restore")
# fairseq multiplies --moe-gate-loss-wt and --moe-losses, so that --moe-losses alone would replace
# the default weight of 1.0
_BALANCE_WEIGHTS = {"fairseq": "--moe-gate-loss-wt", "megatron": "--moe-aux-loss-coeff",
                    "transformers": "router_aux_loss_coef", "pytorch": "losses.switch"}
# The settings of the flags in remedies, for hosts without a command line. They are listed here
# because `moe_plugin.config` needs torch, and a report is made without torch.
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
    """A problem that a rule found in a run.

    Attributes:
        rule: the name of the rule, a key of `RULES`.
        title: a description of the problem that includes measured values.
        meaning: how the problem affects the run.
        remedy: the flags or settings that the user should change.
        layers: the names of the affected layers. Empty if the finding applies to the whole run.
        past: whether the problem has disappeared.
        steps: the first and the last affected step. None if the finding does not apply to
            particular steps.
    """

    rule: str
    title: str
    meaning: str
    remedy: str
    layers: tuple[str, ...] = ()
    past: bool = False
    steps: tuple[int, int] | None = None


def findings(run: RunRecord, skip: Iterable[str] = (), *, past: bool = True) -> list[Finding]:
    """Apply all rules to a run. Findings are ordered by severity, and findings about past problems
    come last.

    Args:
        skip: the names of rules that are not applied.
        past: whether to include past problems, from which the layers have recovered. Defaults to
            True.
    """
    skipped = set(skip)
    results = [finding for name, rule in RULES.items() if name not in skipped for finding in (
        _of_layers(rule, run, past) if isinstance(rule, LayerRule) else rule(run))]
    if "drops" not in skipped:
        results += _dropped_in_validation(run)
    order = list(RULES)
    return [dataclasses.replace(finding, remedy=_for_host(finding.remedy, run.host))
            for finding in sorted(results, key=lambda f: (f.past, order.index(f.rule)))]


def _for_host(remedy: str, host: str) -> str:
    """Replace the flags in a remedy with the equivalent flags of the given host. If the host has no
    flags, use the settings instead.
    """
    every = "; ".join(f"{name}: {weight}" for name, weight in _BALANCE_WEIGHTS.items())
    remedy = remedy.replace(BALANCE_WEIGHT, _BALANCE_WEIGHTS.get(host, every))
    if host not in OWN_LOOPS:
        return remedy
    remedy = remedy.replace("--moe-losses ...,z=", "losses.z=")
    return re.sub(r"(--moe-[a-z0-9-]+)( (?=[\w.]))?", lambda flag: _SETTINGS.get(
        flag[1], flag[1]) + ("=" if flag[2] else ""), remedy)


def too_few(run: RunRecord) -> str:
    """Return the reason why a run has too few records for the rules about layers, or an empty
    string if there are enough records.
    """
    layers = run.layers or _of_the_log(run)
    most = max(map(len, layers.values()), default=0)
    if most >= RECENT:
        return ""
    have = f"a layer has at most {most}" if most else "there are none"
    return _for_host(
        f"There are too few records of layers to judge how balanced they are: {have}, and {RECENT} "
        "are needed. Train longer, or write records more often with --moe-stats-interval", run.host)


def _of_layers(rule: LayerRule, run: RunRecord, past: bool) -> Iterator[Finding]:
    now, over = rule.look(run.layers or _of_the_log(run), past)
    for found, is_past in ((now, False), (over, True)):
        if found:
            stretches = [e for of_layer in found.values() for e in of_layer]
            yield Finding(rule.name, rule.title(found, is_past), rule.meaning, rule.remedy,
                          tuple(found), is_past, (min(e.first for e in stretches),
                                                  max(e.last for e in stretches)))


def _of_the_log(run: RunRecord) -> dict[str, list[LayerRecord]]:
    """For a run without layer statistics, build records from fairseq's log, which contains only
    means over all layers.
    """
    name = "the mean of all layers"
    records = [LayerRecord(step=r.step, layer=name, drop_fraction=share) for r in run.steps
               if (share := r.dropped()) is not None]
    return {name: records} if records else {}


def _dropped_in_validation(run: RunRecord) -> Iterator[Finding]:
    """Check whether many choices were dropped in the last validation. The capacity in validation is
    set separately from the capacity in training.
    """
    known = [(r.step, share) for r in run.steps if (share := r.dropped("valid ")) is not None]
    if known and known[-1][1] > DROPPED:
        step, share = known[-1]
        yield Finding(
            "drops", f"{100 * share:.0f} % of the choices are dropped in validation, at step "
            f"{step:,}", "In validation, tokens use fewer experts than in training, or no expert.",
            "--moe-capacity-factor none drops nothing; or raise "
            "--moe-eval-token-fraction, --moe-eval-capacity-factor", steps=(step, step))


def not_finite(run: RunRecord) -> Iterator[Finding]:
    """Find steps whose loss or gradient is not finite."""
    bad = [r.step for r in run.steps
           if r.not_finite or (r.loss is not None and not math.isfinite(r.loss))]
    if bad:
        yield Finding(
            "not_finite",
            f"a loss or gradient is not finite at step {named([f'{s:,}' for s in bad])}",
            "All ranks skip such a step; training stops after ten such steps in a row.",
            "lower the learning rate or lengthen the warm-up; in fp16 lower the initial loss "
            "scale; --moe-router-fp32 true", steps=(bad[0], bad[-1]))


def spikes(run: RunRecord) -> Iterator[Finding]:
    """Find steps at which the loss suddenly increases."""
    losses = [(r.step, r.loss) for r in run.steps if r.loss is not None and math.isfinite(r.loss)]
    seen: list[int] = []
    for index in range(MEMORY, len(losses)):
        before = statistics.median(loss for _, loss in losses[index - MEMORY:index])
        if losses[index][1] > max(SPIKE * before, before + SPIKE_NATS):
            seen.append(losses[index][0])
    if seen:
        yield Finding(
            "spikes", f"the loss jumps at step {named([f'{step:,}' for step in seen])}",
            f"The loss is at least {SPIKE:g} times the median of the {MEMORY} previous records.",
            "lower the learning rate, clip gradients, add a z-loss "
            "(--moe-losses ...,z=0.001); check whether a layer's balance changed at that step",
            steps=(seen[0], seen[-1]))


def exchange_dominates(run: RunRecord) -> Iterator[Finding]:
    """Find a recorded step that spends most of its time in exchanges between ranks."""
    for (step, rank), spans in sorted(run.timelines.items()):
        total = max((s.end_s for s in spans), default=0.0)
        products = [s for s in spans if s.track == "matmuls"]
        alone = _covered([*products, *(s for s in spans if s.track == "exchange")]
                         ) - _covered(products)
        if total and alone > DOMINATES * total:
            yield Finding(
                "exchange_dominates", f"{100 * alone / total:.0f} % of step {step:,} on rank "
                f"{rank} is spent in exchanges that do not overlap with computation",
                "The network limits the speed, not the processors.",
                "use --moe-parallel auto, which measures layouts that send less; --moe-wire bf16, "
                "which halves the bytes; --moe-all-to-all auto; or more tokens per step",
                steps=(step, step))
            return


def _covered(spans: Sequence[SpanRecord]) -> float:
    """Return the total time in seconds during which at least one of the spans is active."""
    total, until = 0.0, -math.inf
    for s in sorted(spans, key=lambda s: s.start_s):
        total += max(0.0, s.end_s - max(s.start_s, until))
        until = max(until, s.end_s)
    return total


def undecided(run: RunRecord) -> Iterator[Finding]:
    """Find layers whose tuners are still exploring layouts at the end of a long run."""
    begin, end = run.step_range
    after = end - UNDECIDED * (end - begin)
    names = sorted({d.layer for d in run.decisions if d.event == "explore" and d.step > after}
                   - {d.layer for d in run.decisions if d.event in DECIDED and d.step > after})
    if names and end - begin >= 200:
        yield Finding(
            "undecided", f"the tuner still tries layouts in {named(names)}",
            "Steps in which the tuner tries layouts are slower. The tuner chooses a layout for "
            "each range of loads separately.",
            "use --moe-parallel predicted, which chooses a layout without trials; or a larger "
            "balance loss (--moe-losses), because a steadier load has fewer ranges", tuple(names),
            steps=(math.ceil(after), end))


def slower(run: RunRecord) -> Iterator[Finding]:
    """Detect whether the run has become slower."""
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
            f"The two speeds are the best and the last median over {MEMORY} records.",
            "compare the balance of the layers and the time in exchanges over the same steps; "
            "`moe-plugin doctor` on each node finds a slow node",
            steps=(steps[-MEMORY], steps[-1]))


_OF_RUNS: tuple[Callable[[RunRecord], Iterator[Finding]], ...] = (
    not_finite, spikes, exchange_dominates, undecided, slower)
_KNOWN: dict[str, Any] = {**{rule.__name__: rule for rule in _OF_RUNS},
                          **{rule.name: rule for rule in LAYER_RULES}}
# in the order of severity
RULES: Mapping[str, LayerRule | Callable[[RunRecord], Iterator[Finding]]] = {
    name: _KNOWN[name] for name in (
        "not_finite", "collapse", "dead_experts", "drops", "no_balance", "uneven", "sure_router",
        "spikes", "exchange_dominates", "waits_for_experts", "undecided", "slower")}
