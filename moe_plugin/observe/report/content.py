"""Which figures a run gets, and what they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

from moe_plugin.observe.history import LayerRecord, Run, Span, StepRecord
from moe_plugin.observe.report.figures import (
    Band,
    Bands,
    Figure,
    HeatMap,
    Line,
    LineChart,
    Section,
    Table,
    chart,
    line,
    mean_known,
    over_columns,
)
from moe_plugin.observe.report.text import number

LINES = 6  # layers drawn one by one; of more: the highest, the middle and the lowest
COLUMNS, CELLS = 120, 200_000  # of heat maps: columns at most, cells of all of them together
DECISIONS, SPANS = 200, 1500
UNKNOWN = math.nan


def sections(run: Run) -> list[Section]:
    """All figures for which the run has data."""
    found = [
        Section("Training", training(run)),
        Section("Balance of the experts", [*balance(run), *heat_maps(run)]),
        Section("Router", router(run)),
        Section("Exchange and layouts", [*exchange(run), *layouts(run)]),
        Section("Time of a step", timelines(run))
    ]
    return [section for section in found if section.figures]


def training(run: Run) -> list[Figure]:
    """Loss, speed, gradient norm, learning rate."""
    def of(name: str, field: str, **style: bool) -> Line | None:
        return line(name, [(r.step, getattr(r, field))
                           for r in run.steps if getattr(r, field) is not None], **style)

    figures: list[Figure] = []
    figures += chart(
        "loss", "Loss", "Nats a token, without the balance loss where the log tells them apart.",
        [of("training", "loss"), of("validation", "valid_loss", marks=True)], floor=None)
    figures += chart("speed", "Tokens a second",
                     "Of all ranks together, over each logged interval.",
                     [of("tokens/s", "tokens_per_s")], unit="count")
    figures += chart("grad-norm", "Gradient norm", "Before clipping.", [of("norm", "grad_norm")])
    figures += chart("rate", "Learning rate", "As scheduled.", [of("rate", "learning_rate")])
    return figures


def by_layer(run: Run, value: Callable[[LayerRecord], float | None]) -> list[Line | None]:
    """A line a layer; of many layers the highest, the middle and the lowest at each step."""
    if len(run.layers) <= LINES:
        return [
            line(name, [(r.step, value(r)) for r in records])
            for name, records in run.layers.items()
        ]
    at: dict[int, list[float]] = {}
    for records in run.layers.values():
        for record in records:
            v = value(record)
            if v is not None and math.isfinite(v):
                at.setdefault(record.step, []).append(v)
    rules = {"highest layer": max, "middle layer": statistics.median, "lowest layer": min}
    return [
        line(name, [(step, rule(at[step])) for step in sorted(at)]) for name, rule in rules.items()
    ]


def balance(run: Run) -> list[Figure]:
    """Load and drops by layer."""
    ends = _ends(run)
    figures: list[Figure] = []
    figures += chart("max-mean", "Busiest expert over the mean",
                     "The largest load over the mean load of each record; 1 is perfect balance.", [
                         *by_layer(run, lambda r: r.max_over_mean),
                         line("perfect balance", [(s, 1.0) for s in ends], dashed=True)
                     ], floor=1.0)
    figures += chart("drops", "Dropped choices", "Share of the routed choices that found no slot.",
                     _drops(run), unit="%")
    figures += chart("unused", "Experts that nobody chose", "In the whole record.",
                     by_layer(run, lambda r: r.unused_experts), unit="count")
    return figures


def _drops(run: Run) -> list[Line | None]:
    own = by_layer(run, lambda r: r.drop_fraction)
    return own if any(own) else [
        _extra(run, f"choice {i}", f"overflow_expert{i}", 0.01) for i in (1, 2)
    ]


def _extra(run: Run, name: str, key: str, factor: float = 1.0) -> Line | None:
    return line(name, [(r.step, r.extra[key] * factor) for r in run.steps if key in r.extra])


def _ends(run: Run) -> list[int]:
    steps = [r.step for records in run.layers.values()
             for r in records] + [r.step for r in run.steps]
    return [min(steps), max(steps)]


def heat_maps(run: Run) -> list[Figure]:
    """Load by layer, and for each layer by expert."""
    known = {name: [r for r in records if r.load] for name, records in run.layers.items()}
    known = {name: records for name, records in known.items() if records}
    rows = sum(len(records[-1].load) for records in known.values())
    columns = max(20, min(COLUMNS, CELLS // rows)) if rows else COLUMNS
    figures: list[Figure] = []
    if len(run.layers) > 1 and (overview := _layers_map(run, columns)) is not None:
        figures.append(overview)
    for i, (name, records) in enumerate(known.items()):
        figures.append(_experts_map(f"experts-{i}", name, records, columns))
    return figures


def _layers_map(run: Run, columns: int) -> HeatMap | None:
    steps = sorted({r.step for records in run.layers.values() for r in records})
    at = {
        name: {r.step: UNKNOWN if r.max_over_mean is None else r.max_over_mean for r in records}
        for name, records in run.layers.items()
    }
    if not any(not math.isnan(v) for row in at.values() for v in row.values()):
        return None
    parts = over_columns(steps, columns)
    values = tuple(
        tuple(mean_known([row.get(s, UNKNOWN) for s in steps[a:b]]) for a, b in parts)
        for row in at.values())
    return HeatMap("layers", "Busiest expert over the mean, by layer",
                   "Each row a layer, time to the right.", "layer", tuple(at),
                   tuple(steps[b - 1] for _, b in parts), values)


def _experts_map(id: str, name: str, records: list[LayerRecord], columns: int) -> HeatMap:
    experts = len(records[-1].load)
    records = [r for r in records if len(r.load) == experts]
    shares = [r.shares for r in records]
    parts = over_columns([r.step for r in records], columns)
    values = tuple(
        tuple(mean_known([s[e] for s in shares[a:b]]) for a, b in parts) for e in range(experts))
    return HeatMap(id, f"Load of each expert: {name}",
                   "Each row an expert, time to the right; load over the mean load.", "expert",
                   tuple(map(str,
                             range(experts))), tuple(records[b - 1].step for _, b in parts), values)


def router(run: Run) -> list[Figure]:
    """Entropy and losses by name."""
    lines = by_layer(run, lambda r: r.entropy)
    if not any(lines):
        lines = [_extra(run, "mean over layers", "entropy_gating")]
    top = [
        line(f"uniform over {run.experts}", [(s, math.log(run.experts))
                                             for s in _ends(run)], dashed=True)
    ] if run.experts > 1 else []
    figures: list[Figure] = [
        *chart("entropy", "Entropy of the router",
               "Mean over tokens, in nats; low: each token is sure of its experts.", [*lines, *top])
    ]
    for i, name in enumerate(
            sorted({name for records in run.layers.values() for r in records
                    for name in r.losses})):
        figures += chart(f"loss-{i}", f"Router loss: {name}", "Raw, before its weight.",
                         by_layer(run, lambda r, name=name: r.losses.get(name)), floor=None)
    if not any(f.id.startswith("loss-") for f in figures):
        keys = sorted({
            key for r in run.steps for key in r.extra
            if key.startswith("loss ") or key == "moe_gate_loss"
        })
        for i, key in enumerate(keys):
            title = f"Router loss: {key.removeprefix('loss ')}"
            figures += chart(f"loss-{i}", title, "Mean over layers, from the training log.",
                             [_extra(run, key, key)], floor=None)
    return figures


def exchange(run: Run) -> list[Figure]:
    """Bytes and time of exchanges."""
    figures: list[Figure] = []
    figures += chart(
        "bytes", "Bytes sent to other ranks",
        "By one forward pass on one rank, mean over each record.",
        by_layer(run, lambda r: None
                 if r.bytes_sent is None or not r.calls else r.bytes_sent / r.calls), unit="B")
    # 0 throughout where there is none
    gpu = any(r.extra.get("all_to_all_cuda_time_ms") for r in run.steps)
    times = [
        _extra(run, "on the host", "all_to_all_cpu_time_ms"),
        _extra(run, "on the GPU", "all_to_all_cuda_time_ms") if gpu else None
    ]
    figures += chart("exchange-time", "Time in exchanges",
                     "All-to-all of one layer, forward and backward, as the training log has it.",
                     times, unit="ms")
    return figures


def layouts(run: Run) -> list[Figure]:
    """Layouts over steps, and the tuner's decisions."""
    figures: list[Figure] = []
    figures += _mostly(
        run, "layouts", "Layout of each layer",
        "What most passes of each record ran in: slices r, pieces d, all-to-all, expert kernel.")
    figures += _mostly(run, "exchanges", "All-to-all of each layer",
                       "The algorithm that most exchanges of each record really ran by.")
    figures += _mostly(run, "gates", "Router of each layer",
                       "Of several routers the one that decided most calls of each record.")
    made = run.decisions
    if made:
        rows = tuple(
            (str(d.step), d.layer, "–" if d.call is None else str(d.call), d.event, d.choice,
             number(d.predicted_s, "s"), number(d.measured_s, "s"), d.why)
            for d in made[-DECISIONS:])
        cut = f"The last {DECISIONS} of {len(made)}. " if len(made) > DECISIONS else ""
        figures.append(
            Table("decisions", "Decisions of the tuner",
                  f"{cut}Times are of one layer's forward and backward.",
                  ("step", "layer", "call", "event", "layout", "predicted", "measured", "why"),
                  rows))
    return figures


def _mostly(run: Run, field: str, title: str, about: str) -> list[Bands]:
    """Over steps, the commonest of `layouts`, `exchanges` or `gates`; nothing to see where it is
    the same throughout.
    """
    bands = [
        band for i, records in enumerate(run.layers.values())
        for band in _commonest(i, records, field)
    ]
    return [Bands(field, title, about, tuple(run.layers), tuple(bands))] if len(
        {b.kind for b in bands}) > 1 else []


def _commonest(row: int, records: Iterable[LayerRecord], field: str) -> list[Band]:
    bands: list[Band] = []
    before = 0
    for r in records:
        counts: dict[str, float] = getattr(r, field)
        if counts:
            kind = max(counts, key=lambda name: counts[name])
            if bands and bands[-1].kind == kind and bands[-1].end == before:
                bands[-1] = Band(row, bands[-1].start, r.step, kind, kind)
            else:
                bands.append(Band(row, before, r.step, kind, kind))
        before = r.step
    return bands


def timelines(run: Run) -> list[Figure]:
    """What ran when in each recorded step, and where its time went."""
    figures: list[Figure] = []
    for i, ((step, rank), spans) in enumerate(sorted(run.timelines.items())[:8]):
        if not spans:
            continue
        longest = sorted(spans, key=lambda s: s.start_s - s.end_s)[:SPANS]
        tracks = tuple(dict.fromkeys(s.track for s in spans))
        bands = tuple(
            Band(tracks.index(s.track), s.start_s, s.end_s, _kind(s),
                 f"{s.name}, {number(s.end_s - s.start_s, 's')}")
            for s in sorted(longest, key=lambda s: (tracks.index(s.track), s.start_s)))
        end = max(s.end_s for s in spans)
        figures.append(
            Bands(f"timeline-{i}", f"Step {step} on rank {rank}",
                  f"{number(end, 's')} altogether; each row one kind of work.", tracks, bands, "s"))
        figures.append(_time_table(f"timeline-{i}-sums", step, spans, end))
    return figures


def _kind(span: Span) -> str:
    """What a span's colour stands for: forward or backward of any layer, one kind of exchange, all
    work of another row.
    """
    if span.track == "layers":
        return span.name.rsplit(" ", 1)[-1]
    return span.name if span.track == "exchange" else span.track


def _time_table(id: str, step: int, spans: list[Span], end: float) -> Table:
    sums: dict[tuple[str, str], list[float]] = {}
    for s in spans:
        sums.setdefault((s.track, s.name), []).append(s.end_s - s.start_s)
    top = sorted(sums.items(), key=lambda item: -sum(item[1]))[:20]
    rows = tuple((track, name, str(len(times)), number(sum(times), "s"),
                  number(sum(times) / end if end else None, "%")) for (track, name), times in top)
    return Table(id, f"Where the time of step {step} went",
                 "The largest sums; what runs inside something else counts in both.",
                 ("kind", "name", "times", "together", "of the step"), rows)


def summary(run: Run) -> list[tuple[str, str]]:
    """The table at the top: name and value."""
    losses = [r for r in run.steps if r.loss is not None]
    valid = [r for r in run.steps if r.valid_loss is not None]
    total = run.total_steps
    rows = [("Host", {"fairseq": "fairseq", "megatron": "Megatron-core"}.get(
        run.host, "not known (layer statistics alone)")),
            ("Steps", number(run.last_step, "count") +
             (f" of {number(total, 'count')}" if total and total != run.last_step else ""))]
    if losses:
        rows.append(("Loss, first and last", f"{_at(losses[0])} → {_at(losses[-1])}"))
    if valid:
        best = min(valid, key=lambda r: r.valid_loss or 0.0)
        rows.append(("Validation loss, best", f"{number(best.valid_loss)} at step {best.step:,}"))
    speeds = [r.tokens_per_s for r in run.steps if r.tokens_per_s]
    if speeds:
        rows.append(("Tokens a second, median", number(statistics.median(speeds), "count")))
    if run.seconds is not None:
        rows.append(("Duration", number(run.seconds, "s")))
    return [*rows, *_layer_summary(run)]


def _at(record: StepRecord) -> str:
    return f"{number(record.loss)} (step {record.step:,})"


def _layer_summary(run: Run) -> list[tuple[str, str]]:
    last = {name: records[-1] for name, records in run.layers.items() if records}
    if not last:
        return []
    rows = [("Layers with experts",
             str(len(last)) + (f", {run.experts} experts each" if run.experts else ""))]
    peaks = {name: r.max_over_mean for name, r in last.items() if r.max_over_mean is not None}
    if peaks:
        worst = max(peaks, key=lambda name: peaks[name] or 0.0)
        rows.append(
            ("Busiest expert over the mean, last record", f"{number(peaks[worst])} ({worst})"))
    drops = [
        r.drop_fraction for records in run.layers.values() for r in records
        if r.drop_fraction is not None
    ]
    if drops:
        rows.append(("Dropped choices, mean and worst",
                     f"{number(sum(drops) / len(drops), '%')}, {number(max(drops), '%')}"))
    if run.decisions:
        rows.append(("Decisions of the tuner", str(len(run.decisions))))
    return rows


__all__ = ["LineChart", "sections", "summary"]
