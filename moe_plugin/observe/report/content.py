"""Which figures a run gets, and what they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping

from moe_plugin.observe.history import CopyRecord, LayerRecord, RunRecord, SpanRecord, StepRecord
from moe_plugin.observe.history.records import DROPS
from moe_plugin.observe.report.ensembles import ensemble
from moe_plugin.observe.report.figure_records import (
    Band,
    Bands,
    Figure,
    HeatMap,
    Line,
    ReportSection,
    Table,
    chart,
    line,
    mean_known,
    over_columns,
    settled,
)
from moe_plugin.observe.report.text import HOSTS, number

LINES = 6  # layers drawn one by one; of more: the highest, the middle and the lowest
COLUMNS, CELLS = 120, 200_000  # of heat maps: columns at most, cells of all of them together
DECISIONS, SPANS, TIMELINES = 200, 1500, 8


def sections(run: RunRecord) -> list[ReportSection]:
    """All figures for which the run has data."""
    found = [
        ReportSection("Training", training(run)),
        ReportSection("Ensemble", ensemble(run)),
        ReportSection("Load balance", balance(run)),
        ReportSection("Load by layer and by expert", heat_maps(run)),
        ReportSection("Router", router(run)),
        ReportSection("Exchange and layouts", [*exchange(run), *layouts(run)]),
        ReportSection("Experts outside the device", store(run)),
        ReportSection("Activations and weights outside the device", copies(run)),
        ReportSection("Time of a step", timelines(run)),
    ]
    return [settled(section) for section in found if section.figures]


def training(run: RunRecord) -> list[Figure]:
    """Loss, throughput, gradient norm, learning rate."""

    def of(name: str, value: Callable[[StepRecord], float | None], **style: bool) -> Line | None:
        return line(name, [(r.step, v) for r in run.steps if (v := value(r)) is not None], **style)

    return [
        *chart("loss", "Loss", "Nats per token, without the balance loss where the log separates "
               "them.", [of("training", lambda r: r.loss),
                         of("validation", lambda r: r.valid_loss, marks=True)], floor=None),
        *chart("speed", "Tokens per second", "Of all ranks together, over each logged interval.",
               [of("tokens/s", lambda r: r.tokens_per_s)], unit="count"),
        *chart("grad-norm", "Gradient norm", "Before clipping.",
               [of("norm", lambda r: r.grad_norm)]),
        *chart("rate", "Learning rate", "As scheduled.", [of("rate", lambda r: r.learning_rate)]),
    ]


def by_layer(run: RunRecord, value: Callable[[LayerRecord], float | None]) -> list[Line | None]:
    """One line per layer; of many layers the highest, the middle and the lowest at each step."""
    if len(run.layers) <= LINES:
        return [line(name, [(r.step, value(r)) for r in records])
                for name, records in run.layers.items()]
    at: dict[int, list[float]] = {}
    for record in run.layer_records:
        v = value(record)
        if v is not None and math.isfinite(v):
            at.setdefault(record.step, []).append(v)
    rules = {"highest layer": max, "middle layer": statistics.median, "lowest layer": min}
    return [line(name, [(step, rule(at[step])) for step in sorted(at)])
            for name, rule in rules.items()]


def _reference(run: RunRecord, name: str, value: float) -> Line | None:
    return line(name, [(step, value) for step in run.step_range], dashed=True)


def _extra(run: RunRecord, name: str, key: str, factor: float = 1.0) -> Line | None:
    return line(name, [(r.step, r.extra[key] * factor) for r in run.steps if key in r.extra])


def balance(run: RunRecord) -> list[Figure]:
    """Load imbalance and drops by layer."""
    drops = by_layer(run, lambda r: r.drop_fraction)
    if not any(drops):
        drops = [_extra(run, f"choice {i}", key, 0.01) for i, key in enumerate(DROPS, 1)]
    valid = [(r.step, v) for r in run.steps if (v := r.dropped("valid ")) is not None]
    return [
        *chart("max-mean", "Busiest expert over mean load",
               "The largest load over the mean load of each record; 1 is perfect balance.",
               [*by_layer(run, lambda r: r.max_over_mean),
                _reference(run, "perfect balance", 1.0)], floor=1.0),
        *chart("drops", "Dropped choices", "Share of the routed choices beyond the capacity.",
               drops, unit="%"),
        *chart("drops-valid", "Dropped choices in validation", "Mean over layers, from the "
               "training log.", [line("validation", valid, marks=True)], unit="%"),
        *chart("unused", "Unused experts", "Experts without any token in the whole record.",
               by_layer(run, lambda r: r.unused_experts), unit="count"),
    ]


def heat_maps(run: RunRecord) -> list[Figure]:
    """Load by layer, and for each layer by expert."""
    known = {name: [r for r in records if r.load] if any(any(r.load) for r in records) else []
             for name, records in run.layers.items()}
    known = {name: records for name, records in known.items() if records}
    rows = sum(len(records[-1].load) for records in known.values())
    columns = max(20, min(COLUMNS, CELLS // rows)) if rows else COLUMNS
    return [*_layers_map(run, columns),
            *(_experts_map(f"experts-{i}", name, records, columns)
              for i, (name, records) in enumerate(known.items()))]


def _layers_map(run: RunRecord, columns: int) -> list[HeatMap]:
    at = {name: {r.step: r.max_over_mean for r in records if r.max_over_mean is not None}
          for name, records in run.layers.items()}
    if len(at) < 2 or not any(at.values()):
        return []
    steps = sorted({r.step for r in run.layer_records})
    parts = over_columns(steps, columns)
    values = tuple(
        tuple(mean_known([row.get(s, math.nan) for s in steps[a:b]]) for a, b in parts)
        for row in at.values())
    return [HeatMap("layers", "Busiest expert over mean load, by layer",
                    "One row per layer, time to the right.", "layer", tuple(at),
                    tuple(steps[b - 1] for _, b in parts), values)]


def _experts_map(id: str, name: str, records: list[LayerRecord], columns: int) -> HeatMap:
    experts = len(records[-1].load)
    records = [r for r in records if len(r.load) == experts]
    shares = [r.shares for r in records]
    parts = over_columns([r.step for r in records], columns)
    values = tuple(
        tuple(mean_known([s[e] for s in shares[a:b]]) for a, b in parts) for e in range(experts))
    return HeatMap(id, f"Load of each expert: {name}",
                   "One row per expert, time to the right; load over the mean load.", "expert",
                   tuple(map(str, range(experts))), tuple(records[b - 1].step for _, b in parts),
                   values)


def router(run: RunRecord) -> list[Figure]:
    """Entropy and losses by name."""
    lines = by_layer(run, lambda r: r.entropy)
    if not any(lines):
        lines = [_extra(run, "mean over layers", "entropy_gating")]
    if run.experts > 1:
        lines.append(_reference(run, f"uniform over {run.experts}", math.log(run.experts)))
    entropy = chart("entropy", "Router entropy", "Mean over tokens, in nats; low: the router is "
                    "sure of each token's experts.", lines)
    return [*entropy, *(_layer_losses(run) or _logged_losses(run))]


def _layer_losses(run: RunRecord) -> list[Figure]:
    names = sorted({name for record in run.layer_records for name in record.losses})
    return [figure for i, name in enumerate(names) for figure in chart(
        f"loss-{i}", f"Router loss: {name}", "Before its weight.",
        by_layer(run, lambda r, name=name: r.losses.get(name)), floor=None)]


def _logged_losses(run: RunRecord) -> list[Figure]:
    keys = sorted({key for r in run.steps for key in r.extra
                   if key.startswith("loss ") or key == "moe_gate_loss"})
    return [figure for i, key in enumerate(keys) for figure in chart(
        f"loss-{i}", f"Router loss: {key.removeprefix('loss ')}",
        "Mean over layers, from the training log.", [_extra(run, key, key)], floor=None)]


def exchange(run: RunRecord) -> list[Figure]:
    """Bytes and time of exchanges."""

    def bytes_per_call(r: LayerRecord) -> float | None:
        return None if r.bytes_sent is None or not r.calls else r.bytes_sent / r.calls

    times = [_extra(run, "on the host", "all_to_all_cpu_time_ms")]
    if any(r.extra.get("all_to_all_cuda_time_ms") for r in run.steps):  # without a GPU all are 0
        times.append(_extra(run, "on the GPU", "all_to_all_cuda_time_ms"))
    return [
        *chart("bytes", "Bytes sent to other ranks",
               "By one forward pass on one rank, mean over each record.",
               by_layer(run, bytes_per_call), unit="B"),
        *chart("exchange-time", "Time in exchanges",
               "All-to-all of one layer, forward and backward, from the training log.",
               times, unit="ms"),
    ]


def store(run: RunRecord) -> list[Figure]:
    """Experts in host memory or in a file: what calls found, and waited for."""

    def per_call(name: str) -> Callable[[LayerRecord], float | None]:
        return lambda r: r.store.get(name, 0.0) / r.calls if r.store and r.calls else None

    return [
        *chart("store-hits", "Experts found on the device",
               "Share of the experts that a call needed; fetched ahead counts as found.",
               by_layer(run, lambda r: r.hit_rate), unit="%"),
        *chart("store-stalls", "Calls that waited for experts", "Share of the calls on one rank.",
               by_layer(run, per_call("stalls")), unit="%"),
        *chart("store-bytes", "Experts copied to the device", "Bytes of a call on one rank.",
               by_layer(run, per_call("bytes")), unit="B"),
        *chart("store-resident", "Experts on the device",
               "Bytes of the experts in the slots of a rank, which layers share; mean over calls.",
               by_layer(run, per_call("resident_bytes")), unit="B"),
        *chart("store-wasted", "Experts fetched in vain",
               "Brought ahead by a call and gone without being used.",
               by_layer(run, per_call("wasted"))),
    ]


def copies(run: RunRecord) -> list[Figure]:
    """What was copied to and from the device, and what that cost."""

    def of(value: Callable[[CopyRecord], float]) -> list[Line | None]:
        return [line(name, [(r.step, value(r) / r.ranks) for r in records])
                for name, records in run.copies.items()]

    def resident(r: CopyRecord) -> float | None:
        return r.resident_bytes / r.ranks or None

    policies = [record for records in run.copies.values() for record in records
                if record.keep or record.recompute or record.swap]
    return [
        *chart("copied-resident", "Bytes on the device",
               "Of one rank, the most of a step: activations that were counted; the places for "
               "weights.", [line(name, [(r.step, resident(r)) for r in records])
                            for name, records in run.copies.items()], unit="B"),
        *chart("copied-policies", "Activations kept, recomputed, swapped",
               "Blocks of one rank.",
               [line(name, [(r.step, vars(r)[field] / r.ranks) for r in policies])
                for field, name in (("keep", "kept"), ("recompute", "recomputed"),
                                    ("swap", "swapped"))]),
        *chart("copied-bytes", "Copied to and from the device",
               "Bytes of one rank between two records.", of(lambda r: r.bytes), unit="B"),
        *chart("copied-stalls", "Waiting for copies",
               "Seconds of one rank between two records in which computation waited.",
               of(lambda r: r.stalled_s), unit="s"),
        *chart("copied-waits", "Copies that came too late",
               "Waits of one rank between two records.", of(lambda r: r.waits)),
    ]


def layouts(run: RunRecord) -> list[Figure]:
    """Layouts over steps, and the tuner's decisions."""
    return [
        *_mostly(run, "layouts", "Layout of each layer", lambda r: r.layouts,
                 "The most frequent layout of each record: slices r, pieces d, all-to-all, expert "
                 "kernel."),
        *_mostly(run, "exchanges", "All-to-all of each layer", lambda r: r.exchanges,
                 "The algorithm of most exchanges of each record."),
        *_mostly(run, "routers", "Router of each layer", lambda r: r.routers,
                 "With several routers, the one of most calls of each record."),
        *_mostly(run, "collectives", "Collectives of each layer", lambda r: r.collectives,
                 "What gathers and sums its data (`comm.collectives`)."),
        *_decisions(run),
    ]


def _decisions(run: RunRecord) -> list[Table]:
    made = run.decisions
    if not made:
        return []
    rows = tuple(
        (str(d.step), d.layer, "–" if d.call is None else str(d.call), d.event, d.choice,
         number(d.predicted_s, "s"), number(d.measured_s, "s"), d.why)
        for d in made[-DECISIONS:])
    cut = f"The last {DECISIONS} of {len(made)}. " if len(made) > DECISIONS else ""
    return [Table("decisions", "Decisions of the tuner",
                  f"{cut}Times are of one layer's forward and backward.",
                  ("step", "layer", "call", "event", "layout", "predicted", "measured", "why"),
                  rows)]


def _mostly(run: RunRecord, id: str, title: str,
            counts: Callable[[LayerRecord], Mapping[str, float]],
            about: str) -> list[Bands]:
    """The most frequent name over steps; nothing if it never changes."""
    bands = [band for i, records in enumerate(run.layers.values())
             for band in _most_frequent(i, records, counts)]
    varied = len({b.kind for b in bands}) > 1
    return [Bands(id, title, about, tuple(run.layers), tuple(bands))] if varied else []


def _most_frequent(row: int, records: Iterable[LayerRecord],
                   counts: Callable[[LayerRecord], Mapping[str, float]]) -> list[Band]:
    bands: list[Band] = []
    before = 0
    for r in records:
        found = counts(r)
        if found:
            kind, start = max(found, key=lambda name: found[name]), before
            if bands and bands[-1].kind == kind and bands[-1].end == before:
                start = bands.pop().start
            bands.append(Band(row, start, r.step, kind, kind))
        before = r.step
    return bands


def timelines(run: RunRecord) -> list[Figure]:
    """The spans of each recorded step, and where its time went."""
    figures: list[Figure] = []
    for i, ((step, rank), spans) in enumerate(sorted(run.timelines.items())[:TIMELINES]):
        if not spans:
            continue
        tracks = tuple(dict.fromkeys(s.track for s in spans))
        longest = sorted(spans, key=lambda s: s.start_s - s.end_s)[:SPANS]
        bands = tuple(
            Band(tracks.index(s.track), s.start_s, s.end_s, _kind(s),
                 f"{s.name}, {number(s.end_s - s.start_s, 's')}")
            for s in sorted(longest, key=lambda s: (tracks.index(s.track), s.start_s)))
        end = max(s.end_s for s in spans)
        about = f"{number(end, 's')} in total; one row per kind of work."
        figures += [Bands(f"timeline-{i}", f"Step {step} on rank {rank}", about, tracks, bands,
                          "s"), _time_table(f"timeline-{i}-sums", step, spans, end)]
    return figures


def _kind(span: SpanRecord) -> str:
    """What the colour of a span means.

    Forward or backward of any layer, one kind of exchange, or all work of another row.
    """
    if span.track == "layers":
        return span.name.rsplit(" ", 1)[-1]
    return span.name if span.track == "exchange" else span.track


def _time_table(id: str, step: int, spans: list[SpanRecord], end: float) -> Table:
    sums: dict[tuple[str, str], list[float]] = {}
    for s in spans:
        sums.setdefault((s.track, s.name), []).append(s.end_s - s.start_s)
    top = sorted(sums.items(), key=lambda item: -sum(item[1]))[:20]
    rows = tuple((track, name, str(len(times)), number(sum(times), "s"),
                  number(sum(times) / end if end else None, "%")) for (track, name), times in top)
    return Table(id, f"Where the time of step {step} went",
                 "The largest sums; nested spans count in both.",
                 ("kind", "name", "count", "total", "of the step"), rows)


def summary(run: RunRecord) -> list[tuple[str, str]]:
    """The table at the top: name and value."""
    losses = [r for r in run.steps if r.loss is not None]
    valid = [r for r in run.steps if r.valid_loss is not None]
    rows = [("Host", HOSTS.get(run.host, "unknown (layer statistics only)")),
            ("Steps", _steps(run))]
    if losses:
        first, last = (f"{number(r.loss)} (step {r.step:,})" for r in (losses[0], losses[-1]))
        rows.append(("Loss, first and last", f"{first} → {last}"))
    if valid:
        best = min(valid, key=lambda r: r.valid_loss or 0.0)
        rows.append(("Validation loss, best", f"{number(best.valid_loss)} at step {best.step:,}"))
    speeds = [r.tokens_per_s for r in run.steps if r.tokens_per_s]
    if speeds:
        rows.append(("Tokens per second, median", number(statistics.median(speeds), "count")))
    if run.seconds is not None:
        rows.append(("Duration", number(run.seconds, "s")))
    return [*rows, *_layer_summary(run)]


def _steps(run: RunRecord) -> str:
    if run.host == "pytorch":  # counts as its loop does; hosts count from 1
        first, last = run.steps_covered
        return f"{last - first + 1:,} ({first:,} to {last:,})" if last >= 0 else "0"
    total = run.total_steps
    done = number(run.last_step, "count")
    return f"{done} of {number(total, 'count')}" if total and total != run.last_step else done


def _layer_summary(run: RunRecord) -> list[tuple[str, str]]:
    last = run.last_records
    if not last:
        return []
    experts = f", {run.experts} experts each" if run.experts else ""
    rows = [("Layers with experts", f"{len(last)}{experts}")]
    peaks = {name: r.max_over_mean for name, r in last.items() if r.max_over_mean is not None}
    if peaks:
        worst = max(peaks, key=lambda name: peaks[name])
        rows.append(("Busiest expert over mean load, last record",
                     f"{number(peaks[worst])} ({worst})"))
    drops = [r.drop_fraction for r in run.layer_records if r.drop_fraction is not None]
    if drops:
        rows.append(("Dropped choices, mean and worst",
                     f"{number(sum(drops) / len(drops), '%')}, {number(max(drops), '%')}"))
    if run.decisions:
        rows.append(("Decisions of the tuner", str(len(run.decisions))))
    return rows
