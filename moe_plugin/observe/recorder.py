"""`StatsRecorder`: collects `LayerStats`, reduces them once per interval, writes them to files.

    recorder = StatsRecorder(run.observe, comm)
    for step in ...:
        out = layer(x)
        recorder.add("layer3", out.stats)
        host_logs = recorder.step(step)     # {} except at the end of an interval

Between two records nothing is copied to the host and nothing is sent: each interval costs one
all-reduce and one copy. What the files are is set by `ObserveConfig`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm, LocalComm
from moe_plugin.config import ObserveConfig, flatten, to_dict
from moe_plugin.layer import MoELayer
from moe_plugin.memory.copier import Copier, CopyCounters, OnDevice
from moe_plugin.observe.health import HealthLog
from moe_plugin.observe.history.json_lines import TRAINING, training_record
from moe_plugin.observe.history.records import StepRecord
from moe_plugin.observe.model_layers import differing, listen_to
from moe_plugin.observe.sinks import JsonlSink, Sink, TensorBoardSink, WandbSink
from moe_plugin.output import LayerStats

# LayerStats kept before they are summed: bounds memory, saves small device operations
FOLD_AT = 64
# of a store of experts, see `StoredExperts.taken_counts`
_STORE = ("hits", "misses", "prefetched", "wasted", "stalls", "bytes", "resident_bytes")
# what the host knows of each call; `capped`, `balanced`: calls with a capacity, and with a router
# that balances without a loss
_HOST = ("calls", "bytes_sent", "rows", "rows_sent", "rows_between", "capacity", "capped",
         "balanced", *_STORE)
_THREAD = threading.local()


class _Copies:
    """What a copier did since the last record, and what stays on the device."""

    def __init__(self, copier: Copier, on_device: Callable[[], OnDevice]) -> None:
        self.copier, self._before = copier, dataclasses.astuple(copier.counters)
        self.on_device = on_device

    def vector(self) -> Tensor:
        """Float64 [10], in the order of `CopyCounters` and `OnDevice`."""
        now = dataclasses.astuple(self.copier.counters)
        grown = [after - before for after, before in zip(now, self._before, strict=True)]
        self._before = now
        return torch.tensor([*grown, *dataclasses.astuple(self.on_device())], dtype=torch.float64)


def _copy_record(sums: Tensor, ranks: int) -> dict[str, Any]:
    """One record, ready for JSON: see docs/observability.md. sums: `vector` over all ranks."""
    return {"ranks": ranks, **{
        field.name: round(value) if isinstance(field.default, int) else value
        for field, value in zip((*dataclasses.fields(CopyCounters), *dataclasses.fields(OnDevice)),
                                sums.tolist(), strict=True)}}


@dataclass
class _Collected:
    """Statistics of one layer since the last record.

    Attributes:
        pending: not yet summed.
        sums_V: float64 [E + 4], `_device_sums` of older ones.
        losses: by name, float64 [2]: the sum, and the number of calls that had this loss.
        host: sums by the names of `_HOST`.
    """

    experts: int
    pending: list[LayerStats] = field(default_factory=list)
    sums_V: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    host: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    exchanges: Counter[str] = field(default_factory=Counter)
    routers: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def add(self, stats: LayerStats) -> None:
        self.pending.append(stats)
        self.host.update(stats.store, calls=1, bytes_sent=stats.bytes_sent, rows=stats.rows,
                         rows_sent=stats.rows_sent, rows_between=stats.rows_between,
                         capacity=stats.capacity or 0, capped=stats.capacity is not None,
                         balanced=stats.self_balanced)
        self.layouts.update([stats.layout] if stats.layout is not None else [])
        self.routers.update([stats.router] if stats.router is not None else [])
        self.collectives.update([stats.collectives] if stats.collectives is not None else [])
        self.exchanges.update(stats.exchanges)
        self.decisions += stats.decisions
        if len(self.pending) >= FOLD_AT:
            self.fold()

    def fold(self) -> None:
        if not self.pending:
            return
        sums_V = _device_sums(self.pending)
        self.sums_V = sums_V if self.sums_V is None else self.sums_V + sums_V
        for name in sorted({name for stats in self.pending for name in stats.losses}):
            values_N = torch.stack([s.losses[name] for s in self.pending if name in s.losses])
            values_N = values_N.double()
            sum_2 = torch.stack([values_N.sum(), torch.full_like(values_N[0], len(values_N))])
            self.losses[name] = self.losses[name] + sum_2 if name in self.losses else sum_2
        self.pending.clear()

    def copied(self) -> _Collected:
        """The same so far: what either takes from now on is not in the other."""
        return dataclasses.replace(self, **{
            f.name: copy.copy(getattr(self, f.name)) for f in dataclasses.fields(self)
        })

    def vector(self) -> Tensor:
        """Everything that is summed over ranks, float64 [E + 4 + 15 + 2 * losses]."""
        self.fold()
        assert self.sums_V is not None
        host_N = torch.tensor([self.host[name] for name in _HOST], dtype=torch.float64,
                              device=self.sums_V.device)
        losses = [self.losses[name] for name in sorted(self.losses)]
        return torch.cat([self.sums_V, host_N, *losses])

    def record(self, sums: Tensor) -> dict[str, Any]:
        """One record, ready for JSON: see docs/observability.md. sums: `vector` over all ranks."""
        e = self.experts
        # ranks that report the same tokens report shares of them: their sum is whole up to rounding
        *load, kept, tokens = map(int, sums[: e + 2].round().tolist())
        entropy, peak, *counts = sums[e + 2 : e + 4 + len(_HOST)].tolist()
        host = dict(zip(_HOST, counts, strict=True))
        losses = zip(sorted(self.losses), sums[e + 4 + len(_HOST) :].view(-1, 2).tolist(),
                     strict=True)
        routed = sum(load)
        return {
            "calls": int(host["calls"]),
            "tokens": tokens,
            "load": load,
            "max_over_mean": max(load) / (routed / e) if routed else 0.0,
            "max_over_mean_call": peak / host["calls"],
            "dropped": routed - kept,
            "drop_fraction": (routed - kept) / routed if routed else 0.0,
            "unused_experts": load.count(0),
            # of a router that is not ours it is not known
            "entropy": None if math.isnan(entropy) else entropy / tokens if tokens else 0.0,
            "losses": {name: total / max(count, 1) for name, (total, count) in losses},
            "bytes_sent": int(host["bytes_sent"]),
            "rows": int(host["rows"]),
            "rows_sent": int(host["rows_sent"]),
            "rows_between": int(host["rows_between"]),
            "capacity": host["capacity"] / host["capped"] if host["capped"] else None,
            "self_balanced_calls": int(host["balanced"]),
            # agreed between ranks, so the same on all
            "layouts": dict(self.layouts),
            "decisions": self.decisions,
            "exchanges": dict(self.exchanges),
            "routers": dict(self.routers),
            "collectives": dict(self.collectives),
            "store": {name: count for name in _STORE if (count := int(host[name]))},
        }


class StatsRecorder:
    """Collects statistics by layer; every `config.interval` steps writes one record per layer.

    Args:
        config: interval, and where records go; only rank 0 of `comm` writes.
        comm: ranks whose numbers belong together; None: this rank alone. All of them must have the
            same layers and make the same calls of `step` (with pipeline stages: the ranks of one
            stage).
        skip: findings that the host warns of itself.
        host: what trains, for the report: `pytorch`, `fairseq`, `megatron`.
    Raises:
        ValueError: a file that cannot be written; TensorBoard or Weights & Biases is wanted and not
            installed.
    """

    def __init__(self, config: ObserveConfig, comm: Comm | None = None,
                 skip: Iterable[str] = (), host: str = "pytorch") -> None:
        self.config, self.comm = config, comm if comm is not None else LocalComm()
        self.host = host
        self._layers: dict[str, _Collected] = {}
        self._copiers: dict[str, _Copies] = {}
        self._copied: dict[str, dict[str, Any]] = {}  # records that are not written yet
        self.health = HealthLog(skip, tell=self._alert, host=host)
        lines = functools.partial(JsonlSink, take_over=config.take_over_folder)
        kinds = ((lines, config.jsonl), (TensorBoardSink, config.tensorboard),
                 (WandbSink, config.wandb))
        self.sinks: list[Sink] = [kind(place) for kind, place in kinds
                                  if place and self.comm.rank == 0]
        marked_here(self)

    def add(self, layer: str, stats: LayerStats) -> None:
        """Take the statistics of one forward pass; no copy to the host, no communication."""
        if layer not in self._layers:
            self._layers[layer] = _Collected(stats.load_KE.shape[1])
        self._layers[layer].add(stats)

    def add_model(self, model: nn.Module) -> list[str]:
        """From now on `add` is called for each training pass of each MoE layer of a model: made by
        `replace_ffn` or `swap_moe_blocks`, built by hand, or with experts of `transformers`. Writes
        the settings that our own layers were given.

        Returns: the layers' names. Of `transformers`' own routers loads alone are known; ranks of
        its TP group, which hold the same tokens, count them once each.
        Raises:
            ValueError: the model has no such layer.
        """
        found = listen_to(model, self.add)
        if ours := {name: one for name, one in found.items() if isinstance(one, MoELayer)}:
            self.write_settings(ours)
        return list(found)

    def mark(self) -> Callable[[], None]:
        """What undoes all later calls of `add`, as often as it is called before a record."""
        kept = {name: collected.copied() for name, collected in self._layers.items()}

        def undo() -> None:
            self._layers = {name: collected.copied() for name, collected in kept.items()}

        return undo

    def watch(self, name: str, copier: Copier,
              on_device: Callable[[], OnDevice] = OnDevice) -> None:
        """From now on each record says what this copier did, e.g. that of activations or weights.

        All ranks watch the same names.

        Args:
            name: of what it moves.
            on_device: asked at each record.
        """
        self._copiers[name] = _Copies(copier, on_device)

    def step(self, step: int) -> dict[str, float]:
        """Call once per step on every rank; `flush` at the end of an interval, else {}."""
        return self.flush(step) if (step + 1) % self.config.interval == 0 else {}

    def flush(self, step: int) -> dict[str, float]:
        """Reduce and write what was collected since the last record. A collective call.

        Returns:
            Numbers for the host's log; {} if nothing was collected.
        """
        records = self.reduce()
        self.write(step, records)
        if self.comm.rank == 0:
            self.health.add(step, records)
        return summary(records)

    def training(self, step: int, **numbers: float | None) -> None:
        """Take numbers of the training loop, for the files and the findings; rank 0's count.

        numbers: any of loss (nats per token), tokens_per_s, grad_norm, learning_rate, not_finite
            (steps skipped since the record before).
        """
        if self.comm.rank:
            return
        row = {"step": step, "time": time.time(), "training": numbers}
        for sink in self.sinks:
            sink.write(row)
        self.health.add_step(training_record(row))

    def plot(self, record: StepRecord) -> None:
        """Take numbers of the training loop that the host's own log has: to TensorBoard and
        Weights & Biases alone.
        """
        row = {"step": record.step, "time": time.time(), "training": {
            name: getattr(record, name) for name in TRAINING}}
        for sink in self.sinks:
            if not isinstance(sink, JsonlSink):
                sink.write(row)

    def _alert(self, *words: Any) -> None:
        for sink in self.sinks:
            sink.alert(*words)

    def write_settings(self, layers: Mapping[str, MoELayer]) -> None:
        """Write the settings that the layers were given, for the report; values that differ between
        them, one after the other. layers: by the names that records have.
        """
        flat = [flatten(to_dict(layer.given)) for layer in layers.values()]
        of_all = {path: list(dict.fromkeys(str(one.get(path)) for one in flat))
                  for path in dict.fromkeys(path for one in flat for path in one)}
        settings = {path: ", ".join(values) for path, values in of_all.items()}
        for sink in self.sinks:
            if isinstance(sink, JsonlSink):
                sink.write({"host": self.host, "settings": settings,
                            "changed": differing(settings)})

    def write(self, step: int, records: dict[str, dict[str, Any]]) -> None:
        """Write records to the files."""
        now = time.time()
        for sink in self.sinks:
            for name, copied in self._copied.items():
                sink.write({"step": step, "time": now, "copier": name, **copied})
        self._copied = {}
        for layer, record in records.items():
            for sink in self.sinks:
                sink.write({"step": step, "time": now, "host": self.host, "layer": layer,
                            **record})

    def reduce(self) -> dict[str, dict[str, Any]]:
        """Records by layer, over all ranks and all calls since the last one; `write` adds those of
        copiers. One all-reduce.
        """
        if not self._layers and not self._copiers:
            return {}
        layers = dict(sorted(self._layers.items()))
        self._layers = {}
        vectors = [collected.vector() for collected in layers.values()]
        device = vectors[0].device if vectors else self.comm.device
        vectors += [copies.vector().to(device) for _, copies in sorted(self._copiers.items())]
        parts = self.comm.all_reduce(torch.cat(vectors)).cpu().split([v.numel() for v in vectors])
        self._copied = {name: _copy_record(sums, self.comm.size) for name, sums in
                        zip(sorted(self._copiers), parts[len(layers):], strict=True)}
        parts = parts[:len(layers)]
        return {name: collected.record(sums)
                for (name, collected), sums in zip(layers.items(), parts, strict=True)}

    def close(self) -> None:
        """Close the files."""
        for sink in self.sinks:
            sink.close()


class Marked(Protocol):
    """What counts steps that may be repeated."""

    def mark(self) -> Callable[[], None]:
        """What undoes what is counted from now on; see `StatsRecorder.mark`."""


def marked_here(one: Marked) -> None:
    """From now on `marks` of this thread has it, as long as it lives."""
    _of_this_thread().add(one)


def marks() -> list[Callable[[], None]]:
    """`mark` of each recorder that this thread made: for a step that may be repeated."""
    return [recorder.mark() for recorder in _of_this_thread()]


def _of_this_thread() -> weakref.WeakSet[Marked]:
    # simulated ranks are threads
    if not hasattr(_THREAD, "recorders"):
        _THREAD.recorders = weakref.WeakSet()
    return _THREAD.recorders


def summary(records: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Numbers for a host's log line: means over layers, the worst `max_over_mean`, sums of counts.
    """
    if not records:
        return {}
    rows = list(records.values())
    logs = {
        f"moe_{key}": sum(row[key] for row in rows) / len(rows)
        for key in ("max_over_mean", "drop_fraction", "entropy")
        if all(row[key] is not None for row in rows)
    }
    logs["moe_worst_max_over_mean"] = max(row["max_over_mean"] for row in rows)
    logs["moe_unused_experts"] = float(sum(row["unused_experts"] for row in rows))
    logs["moe_bytes_sent"] = float(sum(row["bytes_sent"] for row in rows))
    logs |= _rows_sent([row for row in rows if row["rows_sent"] and row["tokens"]])
    for name in rows[0]["losses"]:
        logs[f"moe_loss_{name}"] = sum(row["losses"].get(name, 0.0) for row in rows) / len(rows)
    return logs


def _rows_sent(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of the layers that send rows: rows of a token, and the share of kept choices without one."""
    if not rows:
        return {}
    sent, between, tokens = (sum(row[key] for row in rows) for key in (
        "rows_sent", "rows_between", "tokens"))
    kept = sum(sum(row["load"]) - row["dropped"] for row in rows)
    return {"moe_rows_sent_per_token": sent / tokens,
            "moe_rows_between_nodes_per_token": between / tokens,
            "moe_rows_saved_by_sending_once": max(0.0, 1 - sent / kept) if kept else 0.0}


def _device_sums(pending: list[LayerStats]) -> Tensor:
    """Sums over calls, float64 [E + 4].

    In this order: load by expert, kept choices, tokens, entropy * tokens, max / mean of the load.
    """
    copies_N = pending[0].load_KE.new_tensor([s.copies for s in pending], dtype=torch.float64)
    load_NE = torch.stack([s.load_KE.sum(0) for s in pending]) / copies_N[:, None]
    kept = (torch.stack([s.kept_KE.sum() for s in pending]) / copies_N).sum()
    tokens_N = torch.stack([s.tokens for s in pending]) / copies_N
    entropy_N = torch.stack([s.entropy for s in pending]).double()
    peak_N = load_NE.amax(1) / load_NE.mean(1).clamp(min=1e-9)
    scalars_4 = torch.stack([kept, tokens_N.sum(), (entropy_N * tokens_N).sum(), peak_N.sum()])
    return torch.cat([load_NE.sum(0), scalars_4])
