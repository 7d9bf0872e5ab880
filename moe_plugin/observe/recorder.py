"""Record the statistics (`LayerStats`) of MoE layers. Statistics are summed over all ranks once per
interval and written to files.

    recorder = StatsRecorder(run.observe, comm)
    for step in ...:
        out = layer(x)
        recorder.add("layer3", out.stats)
        host_logs = recorder.step(step)     # {} except at the end of an interval

Between intervals, no data are copied to the host or sent to other ranks. Each interval requires one
all-reduce and one copy to the host. `ObserveConfig` sets the names of the output files.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm, LocalComm
from moe_plugin.config import ObserveConfig, flatten, to_dict
from moe_plugin.layer import MoELayer
from moe_plugin.memory.copier import Copier, CopyCounters, OnDevice
from moe_plugin.observe.history.json_lines import TRAINING, training_record
from moe_plugin.observe.history.records import StepRecord
from moe_plugin.observe.model_layers import differing, listen_to
from moe_plugin.observe.sinks import HealthLog, JsonlSink, Sink, TensorBoardSink, WandbSink
from moe_plugin.output import LayerStats, StatsSums
from moe_plugin.utils.statistics import statistics

_THREAD = threading.local()


class _Copies:
    """The activity of a copier since its last record, and the device memory in use."""

    def __init__(self, copier: Copier, on_device: Callable[[], OnDevice]) -> None:
        self.copier, self._before = copier, dataclasses.astuple(copier.counters)
        self.on_device = on_device

    def vector(self) -> Tensor:
        """Return all counters as one float64 vector [10], in the order of `CopyCounters` and
        `OnDevice`.
        """
        now = dataclasses.astuple(self.copier.counters)
        grown = [after - before for after, before in zip(now, self._before, strict=True)]
        self._before = now
        return torch.tensor([*grown, *dataclasses.astuple(self.on_device())], dtype=torch.float64)


def _copy_record(sums: Tensor, ranks: int) -> dict[str, Any]:
    """Return one copier record as a dict for JSON, in the form described in docs/observability.md.

    sums: the sum of `_Copies.vector()` over all ranks.
    """
    return {"ranks": ranks, **{
        field.name: round(value) if isinstance(field.default, int) else value
        for field, value in zip((*dataclasses.fields(CopyCounters), *dataclasses.fields(OnDevice)),
                                sums.tolist(), strict=True)}}


class StatsRecorder:
    """Write the statistics of MoE layers to files, with one record per layer every
    `config.interval` steps.

    Args:
        config: the `observe` settings, which contain the interval and the names of the files. Only
            rank 0 of `comm` writes files.
        comm: the ranks over which statistics are summed, such as the ranks of one pipeline stage.
            All ranks must have the same layers and must call `step` the same number of times.
            Defaults to a group that contains only this rank.
        skip: the names of rules to skip because the host logs its own warning.
        host: the name of the host framework for the report, one of `pytorch`, `fairseq` and
            `megatron`.
    Raises:
        ValueError: If a file cannot be written, or if TensorBoard or Weights & Biases is configured
            but not installed.
    """

    def __init__(self, config: ObserveConfig, comm: Comm | None = None,
                 skip: Iterable[str] = (), host: str = "pytorch") -> None:
        self.config, self.comm = config, comm if comm is not None else LocalComm()
        self.host = host
        self._layers: dict[str, StatsSums] = {}
        self._copiers: dict[str, _Copies] = {}
        self._copied: dict[str, dict[str, Any]] = {}  # records that wait to be written
        self.health = HealthLog(skip, tell=self._alert, host=host)
        lines = functools.partial(JsonlSink, take_over=config.take_over_folder)
        kinds = ((lines, config.jsonl), (TensorBoardSink, config.tensorboard),
                 (WandbSink, config.wandb))
        self.sinks: list[Sink] = [kind(place) for kind, place in kinds
                                  if place and self.comm.rank == 0]
        marked_here(self)

    def add(self, layer: str, stats: LayerStats) -> None:
        """Add the statistics of one forward pass of a layer. This neither copies data to the host
        nor communicates with other ranks.
        """
        if layer not in self._layers:
            self._layers[layer] = StatsSums()
        self._layers[layer].add(stats)

    def add_model(self, model: nn.Module) -> list[str]:
        """From now on, record each training pass of each MoE layer in a model.

        The MoE layers may be created by `replace_ffn`, by `swap_moe_blocks` or by your own code.
        Experts modules of `transformers` are also recorded. The settings of this package's layers
        are also written to the files. For the routers of `transformers`, only the load is recorded.
        All ranks of a `transformers` tensor-parallel group process the same tokens, and each of
        these ranks counts them.

        Returns: The names of the MoE layers.
        Raises:
            ValueError: If the model has no MoE layer.
        """
        found = listen_to(model, self.add)
        if ours := {name: one for name, one in found.items() if isinstance(one, MoELayer)}:
            self.write_settings(ours)
        return list(found)

    def mark(self) -> Callable[[], None]:
        """Return a function that restores the current statistics and discards the results of later
        calls of `add`.

        The returned function may be called several times, until the next record is written.
        """
        kept = {name: collected.copied() for name, collected in self._layers.items()}

        def undo() -> None:
            self._layers = {name: collected.copied() for name, collected in kept.items()}

        return undo

    def watch(self, name: str, copier: Copier,
              on_device: Callable[[], OnDevice] = OnDevice) -> None:
        """From now on, record the activity of a copier that moves data such as activations or
        weights.

        All ranks must watch copiers with the same names.

        Args:
            name: a name for the copied data.
            copier: the copier.
            on_device: a function that returns how much device memory is in use, called once per
                record.
        """
        self._copiers[name] = _Copies(copier, on_device)

    def step(self, step: int) -> dict[str, float]:
        """End a training step, and write a record at the end of each interval. Every rank must call
        this method once per step.

        Returns: The result of `flush` at the end of an interval, and an empty dict after every
        other step.
        """
        return self.flush(step) if (step + 1) % self.config.interval == 0 else {}

    def flush(self, step: int) -> dict[str, float]:
        """Sum the statistics since the previous record over all ranks, and write them to the files.
        Collective.

        Returns: Metrics for the host's log, or an empty dict if there are no statistics.
        """
        records = self.reduce()
        self.write(step, records)
        if self.comm.rank == 0:
            self.health.add(step, records)
        return summary(records)

    def training(self, step: int, **numbers: float | None) -> None:
        """Write metrics of the training loop to the files, and check them for problems. Only rank 0
        writes these metrics.

        numbers: the metrics by name. The supported names are loss (in nats per token),
            tokens_per_s, grad_norm, learning_rate and not_finite (the number of skipped steps since
            the last record).
        """
        if self.comm.rank:
            return
        row = {"step": step, "time": time.time(), "training": numbers}
        for sink in self.sinks:
            sink.write(row)
        self.health.add_step(training_record(row))

    def plot(self, record: StepRecord) -> None:
        """Send metrics from the host's log to TensorBoard and Weights & Biases.

        These metrics are not written to the JSONL file, because the report reads them from the
        host's log.
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
        """Write the settings of the layers to the files, so that the report can show them.

        If a setting differs between layers, all of its values are listed. layers: the layers by
        name. The names must be the same as in the records.
        """
        flat = [flatten(to_dict(layer.given)) for layer in layers.values()]
        of_all = {path: list(dict.fromkeys(str(settings.get(path)) for settings in flat))
                  for path in dict.fromkeys(path for settings in flat for path in settings)}
        settings = {path: ", ".join(values) for path, values in of_all.items()}
        for sink in self.sinks:
            if isinstance(sink, JsonlSink):
                sink.write({"host": self.host, "settings": settings,
                            "changed": differing(settings)})

    def write(self, step: int, records: dict[str, dict[str, Any]]) -> None:
        """Write the records of a step to the files."""
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
        """Return one record per layer, summed over all ranks and all calls since the last record.

        This requires a single all-reduce. The records of copiers are not returned here; `write`
        adds them.
        """
        if not self._layers and not self._copiers:
            return {}
        # sorted, because all ranks must concatenate their vectors in the same order
        layers = dict(sorted(self._layers.items()))
        self._layers = {}
        rank, ranks = self.comm.rank, self.comm.size
        vectors = [sums.vector(rank, ranks) for sums in layers.values()]
        device = vectors[0].device if vectors else self.comm.device
        vectors += [copies.vector().to(device) for _, copies in sorted(self._copiers.items())]
        parts = self.comm.all_reduce(torch.cat(vectors)).cpu().split([v.numel() for v in vectors])
        self._copied = {name: _copy_record(sums, self.comm.size) for name, sums in
                        zip(sorted(self._copiers), parts[len(layers):], strict=True)}
        parts = parts[:len(layers)]
        return {name: collected.record(sums, ranks)
                for (name, collected), sums in zip(layers.items(), parts, strict=True)}

    def close(self) -> None:
        """Close the files."""
        for sink in self.sinks:
            sink.close()


class Marked(Protocol):
    """An object that counts passes and can undo its counts when a training step is repeated."""

    def mark(self) -> Callable[[], None]:
        """Return a function that undoes all later counts. See `StatsRecorder.mark`."""


def marked_here(marked: Marked) -> None:
    """Register an object whose counts must be undone if a step is repeated in this thread. It is
    removed from the registry when it is garbage-collected.
    """
    _of_this_thread().add(marked)


def marks() -> list[Callable[[], None]]:
    """Call `mark` of each registered object of this thread and return the results. Call this
    function before a step that may be repeated.
    """
    return [recorder.mark() for recorder in _of_this_thread()]


def _of_this_thread() -> weakref.WeakSet[Marked]:
    # the set is local to the thread because tests simulate ranks by threads
    if not hasattr(_THREAD, "recorders"):
        _THREAD.recorders = weakref.WeakSet()
    return _THREAD.recorders


def summary(records: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Summarize the records of all layers as metrics for one line of the host's training log.

    Depending on the metric, the summary is a mean over layers, a maximum (`max_over_mean`), or a
    sum (counts).
    """
    if not records:
        return {}
    rows, logs = list(records.values()), {}
    for statistic in statistics.values():
        for metric, over_layers in statistic.logged.items():
            names = rows[0][statistic.name] if statistic.by_name else [None]
            for name in names:
                values = [row[statistic.name] if name is None
                          else row[statistic.name].get(name, 0.0) for row in rows]
                if None not in values:
                    logs[metric if name is None else f"{metric}_{name}"] = float(
                        max(values) if over_layers == "max"
                        else sum(values) / (len(rows) if over_layers == "mean" else 1))
    return logs | _rows_sent([row for row in rows if row["rows_sent"] and row["tokens"]])


def _rows_sent(rows: list[dict[str, Any]]) -> dict[str, float]:
    """For layers that send rows, return the number of rows per token and the fraction of rows
    saved.
    """
    if not rows:
        return {}
    sent, between, tokens = (sum(row[key] for row in rows) for key in (
        "rows_sent", "rows_between", "tokens"))
    kept = sum(sum(row["load"]) - row["dropped"] for row in rows)
    return {"moe_rows_sent_per_token": sent / tokens,
            "moe_rows_between_nodes_per_token": between / tokens,
            "moe_rows_saved_by_sending_once": max(0.0, 1 - sent / kept) if kept else 0.0}
