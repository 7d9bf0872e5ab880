"""The table of statistics that are logged for each layer.

Each entry contains all information about one statistic. The table determines what a layer measures
(`LayerStats.more`), how statistics are reduced over calls and ranks (`StatsSums` in
`moe_plugin/output.py`), the keys of records, the fields that `LayerRecord` reads, the metrics in
the host's log, the charts in the report and in comparisons, and the table in docs/observability.md.
To log a new statistic, add an entry to this table. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_plugin.utils.registry import Registry

# How a statistic is reduced over calls and ranks, and how docs/observability.md describes it.
REDUCTIONS = {
    "count": "sum",  # of integers
    "sum": "sum",
    "mean": "mean",  # of the calls that have a value
    "mean per token": "mean over tokens",
    "max": "maximum",
    "names": "calls of rank 0, by name",
    "list": "all values of rank 0",
    "derived": "from other fields",
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart in the report.

    Attributes:
        id: name of the chart. The name must be unique in the report.
        title: the title of the chart.
        about: one sentence that explains the chart.
        section: the heading of the section that contains the chart. A new heading creates a new
            section.
        value: a function that maps a `LayerRecord` to the value to plot, or to None if the value is
            unknown. By default, the statistic itself is plotted.
        unit, floor: see `LineChart`.
        reference: a function that maps the number of experts to the name and the value of a dashed
            line, or to None if no line should be drawn.
        compared: one sentence that explains the chart in a comparison of runs. The comparison shows
            the mean over all layers. None if the chart is not part of comparisons.
    """

    id: str
    title: str
    about: str
    section: str
    value: Callable[[Any], float | None] | None = None
    unit: str = ""
    floor: float | None = 0.0
    reference: Callable[[int], tuple[str, float] | None] = lambda experts: None
    compared: str | None = None


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A statistic that is logged for each layer.

    Attributes:
        name: key of the statistic in records.
        meaning: description of the statistic in docs/observability.md.
        reduce: how the statistic is reduced over calls and ranks, one of the keys of `REDUCTIONS`.
        measure: a function that receives a `RoutedCall` and is called by the layer in each call.
            The function returns a number, or a scalar tensor on the layer's device, which is stored
            in `LayerStats.more`. `measure` is not required if `of_call` computes the statistic from
            other attributes of `LayerStats`.
        of_call: a function that receives the `LayerStats` of one call and returns the value for
            this call, or None. The value may be a number, a tensor, a name or a list. Defaults to
            the value returned by `measure`.
        of_calls: for tensors, a function that replaces `of_call` in order to launch fewer small
            device operations. The function receives the values of earlier statistics, stacked over
            calls, and returns values [N, ...].
        derive: for the reduction `derived`, a function that computes the statistic from earlier
            fields of the record.
        on_device: whether the values are tensors.
        shared: whether all ranks with the same tokens measure the same value, which is then counted
            only once.
        by_name: whether the value of a call is a dict of numbers. Each key is reduced separately.
        names: if `by_name` is True, the keys that the dict of every call contains.
        charts: the charts in the report that show the statistic.
        logged: the metrics in the host's log, and how each metric is computed from the values of
            all layers: `mean`, `max` or `sum`. If `by_name` is True, the key is appended to the
                name of the metric.
    """

    name: str
    meaning: str
    reduce: str
    measure: Callable[[Any], Any] | None = None
    of_call: Callable[[Any], Any] | None = None
    of_calls: Callable[[Mapping[str, Any]], Any] | None = None
    derive: Callable[[Mapping[str, Any]], Any] | None = None
    on_device: bool = False
    shared: bool = False
    by_name: bool = False
    names: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    logged: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reduce not in REDUCTIONS:
            raise ValueError(f"statistic {self.name!r} has reduce={self.reduce!r}. Use one of "
                             f"{', '.join(REDUCTIONS)}")
        sources = (self.measure, self.of_call, self.of_calls, self.derive)
        if not any(sources) or (self.reduce == "derived") != (self.derive is not None):
            raise ValueError(f"statistic {self.name!r} has no value. Pass derive=... for "
                             "reduce='derived', and measure=... or of_call=... otherwise")
        if self.logged and self.reduce in ("names", "list"):
            raise ValueError(f"statistic {self.name!r} has logged={dict(self.logged)}, but its "
                             f"values with reduce={self.reduce!r} are not numbers. Leave logged "
                             "out")

    def value_of(self, stats: Any) -> Any:
        """Return the value of the statistic for one call, or None if the call has no value."""
        return stats.more.get(self.name) if self.of_call is None else self.of_call(stats)


def _check(name: str, value: Statistic) -> None:
    if name != value.name:
        raise ValueError(f"statistic {value.name!r} is registered as {name!r}; use the same name")


statistics: Registry[Statistic] = Registry("statistic", check=_check)


def add(statistic: Statistic) -> Statistic:
    """Add a statistic to the table. Layers that were built earlier do not call its `measure`
    function.
    """
    return statistics.register(statistic.name)(statistic)


BALANCE, ROUTER, EXCHANGE, STORE = (
    "Load balance", "Router", "Exchange and layouts", "Experts outside the device")


def _drop_fraction(record: Mapping[str, Any]) -> float:
    routed = sum(record["load"])
    return record["dropped"] / routed if routed else 0.0


def _max_over_mean(record: Mapping[str, Any]) -> float:
    load = record["load"]
    return max(load) / (sum(load) / len(load)) if sum(load) else 0.0


def _saved_rows(r: Any) -> float | None:
    """Return the fraction of the kept choices for which no separate row was sent, or None if no row
    was saved.
    """
    kept = r.choices * (1 - (r.drop_fraction or 0.0))
    return 1 - r.rows_sent / kept if r.rows_sent and r.rows_sent < kept else None


def _of_store(name: str) -> Callable[[Any], float | None]:
    """Return a function that divides a counter of the expert store by the number of calls."""
    return lambda r: r.store.get(name, 0.0) / r.calls if r.store and r.calls else None


for _entry in (
    Statistic(name="calls", meaning="forward passes in this record, of all ranks", reduce="count",
              of_call=lambda stats: 1),
    Statistic(name="tokens", meaning="tokens, without padding", reduce="count", on_device=True,
              shared=True, of_call=lambda stats: stats.tokens),
    Statistic(name="load", meaning="how often each expert was chosen, before any choices are "
              "dropped; shown in the heat maps", reduce="count", on_device=True, shared=True,
              of_call=lambda stats: stats.load_KE.sum(0)),
    Statistic(name="max_over_mean", meaning="largest load divided by the mean load, over the "
              "whole record; 1 is perfect balance", reduce="derived", derive=_max_over_mean,
              logged={"moe_max_over_mean": "mean", "moe_worst_max_over_mean": "max"},
              charts=(Chart(id="max-mean", title="Busiest expert over mean load", section=BALANCE,
                            about="Largest load divided by mean load, for each record. 1 is "
                            "perfect balance.", floor=1.0,
                            reference=lambda experts: ("perfect balance", 1.0),
                            compared="Mean over layers. 1 is perfect balance."),)),
    Statistic(name="max_over_mean_call", meaning="the same quotient for one call on one rank; "
              "shows how uneven single steps are", reduce="mean", on_device=True,
              of_calls=lambda calls: calls["load"].amax(1)
              / calls["load"].mean(1).clamp(min=1e-9)),
    Statistic(name="dropped", meaning="choices that exceed the capacity and are dropped",
              reduce="count", on_device=True, shared=True,
              of_call=lambda stats: (stats.load_KE - stats.kept_KE).sum()),
    Statistic(name="drop_fraction", meaning="share of the choices that are dropped",
              reduce="derived", derive=_drop_fraction, logged={"moe_drop_fraction": "mean"},
              charts=(Chart(id="drops", title="Dropped choices", section=BALANCE, unit="%",
                            about="The share of the choices that exceed the capacity.",
                            compared="The share of the choices, mean over layers."),)),
    Statistic(name="unused_experts", meaning="experts that no token chose", reduce="derived",
              derive=lambda record: record["load"].count(0), logged={"moe_unused_experts": "sum"},
              charts=(Chart(id="unused", title="Unused experts", section=BALANCE, unit="count",
                            about="Experts without any token in the whole record.",
                            compared="Mean over layers."),)),
    Statistic(name="entropy", meaning="entropy of the router's distribution, in nats; null for "
              "routers of `transformers`", reduce="mean per token", on_device=True,
              of_call=lambda stats: stats.entropy, logged={"moe_entropy": "mean"},
              charts=(Chart(id="entropy", title="Router entropy", section=ROUTER, about="The mean "
                            "over tokens, in nats. A low value means that the router strongly "
                            "prefers some experts for each token.",
                            reference=lambda experts: (
                                f"uniform over {experts}", math.log(experts)
                            ) if experts > 1 else None,
                            compared="Mean over tokens and layers, in nats."),)),
    Statistic(name="losses", meaning="raw router losses by name, each with a chart", reduce="mean",
              on_device=True, by_name=True, of_call=lambda stats: stats.losses,
              logged={"moe_loss": "mean"}),
    Statistic(name="bytes_sent", meaning="bytes sent to other ranks in forward passes, except by "
              "packages", reduce="count", of_call=lambda stats: stats.bytes_sent,
              logged={"moe_bytes_sent": "sum"},
              charts=(Chart(id="bytes", title="Bytes sent to other ranks", section=EXCHANGE,
                            about="One forward pass on one rank, mean over each record.", unit="B",
                            value=lambda r: None if r.bytes_sent is None or not r.calls
                            else r.bytes_sent / r.calls,
                            compared="One forward pass of one layer on one rank, mean over "
                            "layers."),)),
    Statistic(name="rows", meaning="rows computed by experts", reduce="count",
              of_call=lambda stats: stats.rows),
    Statistic(name="rows_sent", meaning="rows sent: with `ragged`, one for each expert, rank or "
              "node ([once](once.md)); with `bounded`, all slots, including empty ones",
              reduce="count", of_call=lambda stats: stats.rows_sent,
              charts=(Chart(id="rows-sent", title="Rows sent, per token", section=EXCHANGE,
                            about="One row for each expert, rank or node that a token visits "
                            "(`dispatch.send`), including the token's own. With `bounded`, all "
                            "slots count, including empty ones.",
                            value=lambda r: r.rows_sent / r.tokens
                            if r.rows_sent and r.tokens else None),
                      Chart(id="rows-saved", title="Rows saved by sending once", section=EXCHANGE,
                            about="The share of rows that is saved, compared with one row for each "
                            "choice.", unit="%", value=_saved_rows))),
    Statistic(name="rows_between", meaning="number of these rows that are sent to other nodes",
              reduce="count", of_call=lambda stats: stats.rows_between,
              charts=(Chart(id="rows-between", title="Rows sent to other nodes, per token",
                            section=EXCHANGE, about="The rows that leave their node. Each row also "
                            "returns, and the backward pass sends as many.",
                            value=lambda r: r.rows_between / r.tokens
                            if r.rows_between and r.tokens else None),)),
    Statistic(name="capacity", meaning="slots per expert and source rank; null when dropless",
              reduce="mean", of_call=lambda stats: stats.capacity),
    Statistic(name="self_balanced_calls", meaning="calls whose router balances without a loss",
              reduce="count", of_call=lambda stats: stats.self_balanced),
    Statistic(name="layouts", meaning="the layout in which calls ran ([adaptive](adaptive.md))",
              reduce="names", of_call=lambda stats: stats.layout,
              charts=(Chart(id="layouts", title="Layout of each layer", section=EXCHANGE,
                            about="The most frequent layout of each record."),)),
    Statistic(name="decisions", meaning="decisions of the tuner: call, load bucket, event "
              "(predict, explore, settle, keep, restore), layout, reason, times", reduce="list",
              of_call=lambda stats: stats.decisions),
    Statistic(name="exchanges", meaning="all-to-alls in forward passes, by the algorithm that "
              "was actually used", reduce="names", of_call=lambda stats: stats.exchanges,
              charts=(Chart(id="exchanges", title="All-to-all of each layer", section=EXCHANGE,
                            about="The most frequent algorithm of each record."),)),
    Statistic(name="routers", meaning="with several routers, the router that decided; otherwise "
              "empty", reduce="names", of_call=lambda stats: stats.router,
              charts=(Chart(id="routers", title="Router of each layer", section=EXCHANGE,
                            about="With several routers, the most frequent router of each "
                            "record."),)),
    Statistic(name="collectives", meaning="[collectives](collectives.md) that are used to gather "
              "and sum data", reduce="names", of_call=lambda stats: stats.collectives,
              charts=(Chart(id="collectives", title="Collectives of each layer", section=EXCHANGE,
                            about="The implementation that gathers and sums data "
                            "(`comm.collectives`)."),)),
    Statistic(name="store", meaning="experts stored outside the device "
              "([offload](offload.md)): found on the device (`hits`), not found (`misses`), "
              "`prefetched`, `wasted`, calls that waited (`stalls`), `bytes` copied, "
              "`resident_bytes` in the shared slots; sums over calls", reduce="count", by_name=True,
              of_call=lambda stats: stats.store,
              names=("hits", "misses", "prefetched", "wasted", "stalls", "bytes",
                     "resident_bytes"),
              charts=(Chart(id="store-hits", title="Experts found on the device", section=STORE,
                            about="The share of the experts that a call needed and found on the "
                            "device, including experts that were fetched ahead.", unit="%",
                            value=lambda r: r.hit_rate),
                      Chart(id="store-stalls", title="Calls that waited for experts",
                            about="The share of the calls on one rank.", section=STORE, unit="%",
                            value=_of_store("stalls")),
                      Chart(id="store-bytes", title="Experts copied to the device",
                            about="The bytes of one call on one rank.", section=STORE, unit="B",
                            value=_of_store("bytes")),
                      Chart(id="store-resident", title="Experts on the device", section=STORE,
                            about="The bytes of the experts in the slots of a rank, which all "
                            "layers share. Mean over calls.", unit="B",
                            value=_of_store("resident_bytes")),
                      Chart(id="store-wasted", title="Experts fetched in vain", section=STORE,
                            about="Experts that a call fetched ahead and that were removed before "
                            "they were used.", value=_of_store("wasted")))),
):
    add(_entry)
