"""Select the figures of a report and their data."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from moe_plugin.observe.history import CopyRecord, LayerRecord, RunRecord, SpanRecord
from moe_plugin.observe.history.records import DROPS
from moe_plugin.observe.report.figure_records import (
    Band,
    Bands,
    Figure,
    HeatMap,
    Line,
    LineChart,
    ReportSection,
    Table,
    chart,
    ensemble,
    experts_map,
    heat_map,
    line,
    settled,
)
from moe_plugin.observe.report.text import NAME, layout_words, number, shortened
from moe_plugin.utils.statistics import (
    BALANCE,
    EXCHANGE,
    ROUTER,
    STORE,
    Chart,
    Statistic,
    statistics,
)

LINES = 6  # with more layers, only the highest, the middle and the lowest value are drawn
COLUMNS, CELLS = 120, 200_000  # the largest number of columns of a heat map, and of cells in total
DECISIONS, SPANS, TIMELINES = 200, 1500, 8

Options = dict[str, Any]  # the keyword arguments of `chart`
# The charts of the training log: id, title, explanation, field of `StepRecord`, name of the curve.
STEP_CHARTS: tuple[tuple[str, str, str, str, str, Options], ...] = (
    ("loss", "Loss", "Nats per token, without the balance loss where the log separates them.",
     "loss", "training", {"floor": None}),
    ("speed", "Tokens per second", "All ranks together, over each logged interval.",
     "tokens_per_s", "tokens/s", {"unit": "count"}),
    ("grad-norm", "Gradient norm", "Before clipping.", "grad_norm", "norm", {}),
    ("rate", "Learning rate", "As scheduled.", "learning_rate", "rate", {}),
)


# The curves of the training log that replace missing layer statistics: name, key, factor.
FROM_LOG = {"drops": [(f"choice {i}", key, 0.01) for i, key in enumerate(DROPS, 1)],
            "entropy": [("mean over layers", "entropy_gating", 1.0)]}


def sections(run: RunRecord) -> list[ReportSection]:
    """Return all sections of the report, with every figure for which the run has data."""
    by_title: dict[str, list[Figure]] = {
        "Training": training(run),
        "Ensemble": ensemble(run),
        BALANCE: balance(run),
        "Load by layer and by expert": [*heat_maps(run)],
        ROUTER: [*charts_of(run, ROUTER), *_losses(run)],
        EXCHANGE: exchange(run),
        STORE: charts_of(run, STORE),
    }
    for _, shown in statistic_charts():
        if shown.section not in by_title:
            by_title[shown.section] = charts_of(run, shown.section)
    by_title |= {
        "Activations and weights outside the device": copies(run),
        "Time of a step": timelines(run),
    }
    return [settled(ReportSection(title, figures))
            for title, figures in by_title.items() if figures]


def statistic_charts() -> list[tuple[Statistic, Chart]]:
    """Return the statistics that are drawn as curves, each with its chart."""
    return [(statistic, shown) for statistic in statistics.values()
            if statistic.reduce != "names" for shown in statistic.charts]


def over_steps(run: RunRecord, field: str, name: str, **style: bool) -> Line | None:
    """Return a curve of one metric in the training log."""
    return line(name, [(r.step, v) for r in run.steps if (v := getattr(r, field)) is not None],
                **style)


def training(run: RunRecord) -> list[Figure]:
    """Return the charts of loss, throughput, gradient norm and learning rate."""
    more = {"loss": [over_steps(run, "valid_loss", "validation", marks=True)]}
    return [figure for id, title, about, field, name, options in STEP_CHARTS for figure in chart(
        id, title, about, [over_steps(run, field, name), *more.get(id, ())], **options)]


def charts_of(run: RunRecord, section: str) -> list[Figure]:
    """Return the charts of all statistics in a section of the report, with one curve per layer."""
    return [figure for statistic, shown in statistic_charts() if shown.section == section
            for figure in _of_layers(run, statistic, shown)]


def value_of(statistic: Statistic, shown: Chart) -> Callable[[LayerRecord], float | None]:
    """Return a function that computes the plotted value from a layer record."""
    return shown.value or (lambda record: record.value(statistic.name))


def _of_layers(run: RunRecord, statistic: Statistic, shown: Chart) -> list[LineChart]:
    lines = by_layer(run, value_of(statistic, shown))
    if not any(lines):
        lines = [_extra(run, *one) for one in FROM_LOG.get(shown.id, ())]
    reference = shown.reference(run.experts)
    if reference is not None:
        name, value = reference
        lines.append(line(name, [(step, value) for step in run.step_range], dashed=True))
    return chart(shown.id, shown.title, shown.about, lines, unit=shown.unit, floor=shown.floor)


def by_layer(run: RunRecord, value: Callable[[LayerRecord], float | None]) -> list[Line | None]:
    """Return one curve per layer for the given value.

    If there are many layers, return three curves: the highest, the middle and the lowest value at
    each step.
    """
    if len(run.layers) <= LINES:
        return [line(name, [(r.step, value(r)) for r in records])
                for name, records in zip(_names(run), run.layers.values(), strict=True)]
    # NumPy, because a long log has hundreds of thousands of records
    steps = sorted({r.step for records in run.layers.values() for r in records})
    column = {step: i for i, step in enumerate(steps)}
    values_LS = np.full((len(run.layers), len(steps)), np.nan)
    for row, records in enumerate(run.layers.values()):
        values_LS[row, [column[r.step] for r in records]] = np.array(
            [value(r) for r in records], float)
    values_LS[~np.isfinite(values_LS)] = np.nan
    values_LS.sort(0)  # unknown values come last
    known_S = (~np.isnan(values_LS)).sum(0)
    [seen_K] = known_S.nonzero()
    known_K, at = known_S[seen_K], [steps[i] for i in seen_K.tolist()]
    low_K, high_K = (values_LS[row_K, seen_K] for row_K in ((known_K - 1) // 2, known_K // 2))
    of_lines = {"highest layer": values_LS[known_K - 1, seen_K], "middle layer":
                (low_K + high_K) / 2, "lowest layer": values_LS[0, seen_K]}
    return [line(name, list(zip(at, of_line.tolist(), strict=True)))
            for name, of_line in of_lines.items()]


def _names(run: RunRecord) -> list[str]:
    """Return the names of the layers, shortened if they remain distinct."""
    short = [shortened(name, NAME) for name in run.layers]
    return short if len(set(short)) == len(short) else list(run.layers)


def _extra(run: RunRecord, name: str, key: str, factor: float = 1.0) -> Line | None:
    return line(name, [(r.step, r.extra[key] * factor) for r in run.steps if key in r.extra])


def balance(run: RunRecord) -> list[Figure]:
    """Return the charts of load imbalance and dropped choices by layer."""
    valid = [(r.step, v) for r in run.steps if (v := r.dropped("valid ")) is not None]
    return [
        *charts_of(run, BALANCE),
        *chart("drops-valid", "Dropped choices in validation", "Mean over layers, from the "
               "training log.", [line("validation", valid, marks=True)], unit="%"),
    ]


def heat_maps(run: RunRecord) -> list[HeatMap]:
    """Return heat maps of the load by layer, and of the load by expert for each layer."""
    known = {name: found for name, records in run.layers.items()
             if any(any(r.load) for r in records) and (found := [r for r in records if r.load])}
    names = dict(zip(run.layers, _names(run), strict=True))
    rows = sum(len(records[-1].load) for records in known.values())
    columns = max(20, min(COLUMNS, CELLS // rows)) if rows else COLUMNS
    return [*_layers_map(run, columns),
            *(experts_map(f"experts-{i}", names[name], records, columns)
              for i, (name, records) in enumerate(known.items()))]


def _layers_map(run: RunRecord, columns: int) -> list[HeatMap]:
    at = {name: {r.step: r.max_over_mean for r in records if r.max_over_mean is not None}
          for name, records in run.layers.items()}
    if len(at) < 2 or not any(at.values()):
        return []
    steps = sorted({r.step for r in run.layer_records})
    cells = {name: [row.get(s, math.nan) for s in steps] for name, row in at.items()}
    return [heat_map("layers", "Busiest expert over mean load, by layer",
                     "One row per layer, time to the right.", "layer", cells, steps, columns)]


def _loss(name: str, r: LayerRecord) -> float | None:
    return r.losses.get(name)


def _losses(run: RunRecord) -> list[Figure]:
    """Return the charts of the router losses. Router losses are read from the layer records or, if
    these contain no losses, from the training log.
    """
    names = sorted({name for record in run.layer_records for name in record.losses})
    keys = sorted({key for r in run.steps for key in r.extra
                   if key.startswith("loss ") or key == "moe_gate_loss"})

    def charts(found: list[tuple[str, list[Line | None]]], about: str) -> list[Figure]:
        return [figure for i, (name, lines) in enumerate(found) for figure in chart(
            f"loss-{i}", f"Router loss: {name}", about, lines, floor=None)]

    return charts([(name, by_layer(run, functools.partial(_loss, name)))
                   for name in names], "Before it is multiplied by its weight.") or charts(
        [(key.removeprefix("loss "), [_extra(run, key, key)]) for key in keys],
        "Mean over layers, from the training log.")


def exchange(run: RunRecord) -> list[Figure]:
    """Return the charts of exchanges and layouts."""
    times = [_extra(run, "on the host", "all_to_all_cpu_time_ms")]
    if any(r.extra.get("all_to_all_cuda_time_ms") for r in run.steps):  # without a GPU all are 0
        times.append(_extra(run, "on the GPU", "all_to_all_cuda_time_ms"))
    return [
        *charts_of(run, EXCHANGE),
        *chart("exchange-time", "Time in exchanges",
               "All-to-all of one layer, forward and backward, from the training log.",
               times, unit="ms"),
        *layouts(run),
    ]


def copies(run: RunRecord) -> list[Figure]:
    """Return the charts of copies to and from the device, and of the time that computation waits
    for them.
    """

    def of(field: str, records: Iterable[CopyRecord], name: str,
           value: Callable[[float], float | None] = float) -> Line | None:
        return line(name, [(r.step, value(getattr(r, field) / r.ranks)) for r in records])

    def each(field: str, **how: Any) -> list[Line | None]:
        return [of(field, records, name, **how) for name, records in run.copies.items()]

    policies = [record for records in run.copies.values() for record in records
                if record.keep or record.recompute or record.swap]
    return [
        *chart("copied-resident", "Bytes on the device",
               "The largest number of bytes in a step on one rank, for activations and for the "
               "slots of weights.", each("resident_bytes", value=lambda v: v or None), unit="B"),
        *chart("copied-policies", "Activations kept, recomputed, swapped",
               "The number of blocks on one rank.",
               [of("keep", policies, "kept"), of("recompute", policies, "recomputed"),
                of("swap", policies, "swapped")]),
        *chart("copied-bytes", "Copied to and from the device",
               "The bytes of one rank between two records.", each("bytes"), unit="B"),
        *chart("copied-stalls", "Waiting for copies",
               "The seconds between two records in which computation on one rank waited.",
               each("stalled_s"), unit="s"),
        *chart("copied-waits", "Late copies",
               "The number of times that one rank waited for a copy between two records.",
               each("waits")),
    ]


def layouts(run: RunRecord) -> list[Figure]:
    """Return figures of the most frequent layouts and algorithms over time, and of the tuners'
    decisions.

    Figures are left out if they would show only a single value.
    """
    found: list[Figure] = []
    named = [(s.name, shown) for s in statistics.values() if s.reduce == "names"
             for shown in s.charts]
    for name, shown in named:
        bands = [band for i, records in enumerate(run.layers.values())
                 for band in _most_frequent(i, records, name)]
        if len({b.kind for b in bands}) > 1:
            found.append(Bands(shown.id, shown.title, shown.about, tuple(run.layers),
                               tuple(bands)))
    return [*found, *_decisions(run)]


def _most_frequent(row: int, records: Iterable[LayerRecord], field: str) -> list[Band]:
    stretches: list[tuple[str, float, float]] = []  # name, start, end
    before: float = 0
    known, kind = None, ""
    for r in records:
        found = r.value(field)
        if found:
            if found is not known:  # equal counts in a log are the same object, which saves time
                kind, known = layout_words(field, max(found, key=lambda name: found[name])), found
            start = before
            if stretches and stretches[-1][::2] == (kind, before):
                start = stretches.pop()[1]
            stretches.append((kind, start, r.step))
        before = r.step
    return [Band(row, start, end, kind, kind) for kind, start, end in stretches]


def _decisions(run: RunRecord) -> list[Table]:
    made = run.decisions
    if not made:
        return []
    rows = tuple(
        (str(d.step), d.layer, "–" if d.call is None else str(d.call), d.event,
         layout_words("layouts", d.choice), number(d.predicted_s, "s"), number(d.measured_s, "s"),
         d.why)
        for d in made[-DECISIONS:])
    cut = f"The last {DECISIONS} of {len(made)}. " if len(made) > DECISIONS else ""
    return [Table("decisions", "Decisions of the tuner",
                  f"{cut}Times are for one layer's forward and backward pass.",
                  ("step", "layer", "call", "event", "layout", "predicted", "measured", "why"),
                  rows)]


def timelines(run: RunRecord) -> list[Figure]:
    """For each recorded step, return a timeline and a table of where the time was spent."""
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
        about = f"{number(end, 's')} in total, one row per kind of work."
        figures += [Bands(f"timeline-{i}", f"Step {step} on rank {rank}", about, tracks, bands,
                          "s"), _time_table(f"timeline-{i}-sums", step, spans, end)]
    return figures


def _kind(span: SpanRecord) -> str:
    """Return the category of a span, which determines its colour.

    The category is `forward` or `backward` for layers, the name of the span for exchanges, and the
    track for all other spans.
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
                 "The largest sums. A nested span also counts in the span around it.",
                 ("kind", "name", "count", "total", "of the step"), rows)
