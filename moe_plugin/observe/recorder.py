"""`StatsRecorder`: collects `LayerStats`, reduces them once an interval, writes them where the
config says.

    recorder = StatsRecorder(config.observe, comm)
    for step in ...:
        out = layer(x)
        recorder.add("layer3", out.stats)
        host_logs = recorder.step(step)     # {} except at the end of an interval

Between two records nothing is copied to the host and nothing is sent: each interval costs one
all-reduce and one copy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.local import LocalComm
from moe_plugin.config import ObserveConfig
from moe_plugin.observe.sinks import JsonlSink, Sink, TensorBoardSink
from moe_plugin.records import LayerStats

# stats kept as they are before they are summed: bounds memory, spares small device operations
_FOLD_AT = 64


@dataclass
class _Collected:
    """Of one layer since the last record: stats not yet summed, the sum of older ones, host-side
    counts.
    """

    experts: int
    pending: list[LayerStats] = field(default_factory=list)
    sums_V: Tensor | None = None
    # [2]: sum, number of calls that had this loss
    losses: dict[str, Tensor] = field(default_factory=dict)
    calls: int = 0
    bytes_sent: int = 0
    rows: int = 0
    capacity: int = 0
    capped: int = 0
    layouts: dict[str, int] = field(default_factory=dict)
    exchanges: dict[str, int] = field(default_factory=dict)
    routers: dict[str, int] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def add(self, stats: LayerStats) -> None:
        self.pending.append(stats)
        self.calls += 1
        self.bytes_sent += stats.bytes_sent
        self.rows += stats.rows
        self.capacity += stats.capacity or 0
        self.capped += stats.capacity is not None
        if stats.layout is not None:
            self.layouts[stats.layout] = self.layouts.get(stats.layout, 0) + 1
        if stats.router is not None:
            self.routers[stats.router] = self.routers.get(stats.router, 0) + 1
        for name, count in stats.exchanges.items():
            self.exchanges[name] = self.exchanges.get(name, 0) + count
        self.decisions += stats.decisions
        if len(self.pending) >= _FOLD_AT:
            self.fold()

    def fold(self) -> None:
        if not self.pending:
            return
        sums_V = _device_sums(self.pending)
        self.sums_V = sums_V if self.sums_V is None else self.sums_V + sums_V
        for name in sorted({name for stats in self.pending for name in stats.losses}):
            values = [stats.losses[name].double() for stats in self.pending if name in stats.losses]
            sum_2 = torch.stack(
                [torch.stack(values).sum(),
                 torch.full_like(values[0], len(values))])
            self.losses[name] = self.losses[name] + sum_2 if name in self.losses else sum_2
        self.pending.clear()

    def vector(self) -> Tensor:
        """Everything that is summed over ranks, float64 [E + 4 + 5 + 2 * losses]."""
        self.fold()
        assert self.sums_V is not None
        host = [self.calls, self.bytes_sent, self.rows, self.capacity, self.capped]
        host_5 = torch.tensor(host, dtype=torch.float64, device=self.sums_V.device)
        return torch.cat(
            [self.sums_V, host_5, *(self.losses[name] for name in sorted(self.losses))])


class StatsRecorder:
    """Accumulates statistics by layer; every `config.interval` steps reduces them over `comm` and
    writes one record a layer.

    Args:
        config: interval, JSONL file, TensorBoard directory; files are written by rank 0 of `comm`
            alone.
        comm: ranks whose numbers belong together. All of them must have the same layers and make
            the same calls of `step` (with pipeline stages: the ranks of one stage). None: this rank
            alone.
    Raises:
        ValueError: a file that cannot be written, or TensorBoard asked for and not installed; with
            the remedy.
    """

    def __init__(self, config: ObserveConfig, comm: Comm | None = None) -> None:
        self.config, self.comm = config, comm if comm is not None else LocalComm()
        self._layers: dict[str, _Collected] = {}
        self.sinks: list[Sink] = []
        if self.comm.rank == 0 and config.jsonl:
            self.sinks.append(JsonlSink(config.jsonl))
        if self.comm.rank == 0 and config.tensorboard:
            self.sinks.append(TensorBoardSink(config.tensorboard))

    def add(self, layer: str, stats: LayerStats) -> None:
        """Take the statistics of one forward pass of a layer. No copy to the host, no
        communication.
        """
        if layer not in self._layers:
            self._layers[layer] = _Collected(stats.load_KE.shape[1])
        self._layers[layer].add(stats)

    def step(self, step: int) -> dict[str, float]:
        """To be called once a step on every rank. At the end of an interval: reduce, write, return
        numbers for the host's log.
        """
        return self.flush(step) if (step + 1) % self.config.interval == 0 else {}

    def flush(self, step: int) -> dict[str, float]:
        """Reduce and write now what was collected since the last record; {} where nothing was. A
        collective call.
        """
        records = self.reduce()
        now = time.time()
        for layer, record in records.items():
            for sink in self.sinks:
                sink.write({"step": step, "time": now, "layer": layer, **record})
        return summary(records)

    def reduce(self) -> dict[str, dict[str, Any]]:
        """Records by layer over all ranks and calls since the last one, and start anew. One
        all-reduce.
        """
        if not self._layers:
            return {}
        layers = dict(sorted(self._layers.items()))
        self._layers = {}
        vectors = [collected.vector() for collected in layers.values()]
        total = self.comm.all_reduce(torch.cat(vectors))
        parts = total.cpu().split([v.numel() for v in vectors])
        return {
            name: _record(c, part) for (name, c), part in zip(layers.items(), parts, strict=True)
        }

    def close(self) -> None:
        """Close the files."""
        for sink in self.sinks:
            sink.close()


def summary(records: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Numbers for a host's log line: over layers, the mean of each figure and the worst
    `max_over_mean`.
    """
    if not records:
        return {}
    rows = list(records.values())
    logs = {
        f"moe_{key}": sum(row[key] for row in rows) / len(rows)
        for key in ("max_over_mean", "drop_fraction", "entropy")
    }
    logs["moe_worst_max_over_mean"] = max(row["max_over_mean"] for row in rows)
    logs["moe_unused_experts"] = float(sum(row["unused_experts"] for row in rows))
    logs["moe_bytes_sent"] = float(sum(row["bytes_sent"] for row in rows))
    for name in rows[0]["losses"]:
        logs[f"moe_loss_{name}"] = sum(row["losses"].get(name, 0.0) for row in rows) / len(rows)
    return logs


def _device_sums(pending: list[LayerStats]) -> Tensor:
    """Sums over calls, float64 [E + 4]: load, kept choices, tokens, entropy * tokens, max / mean of
    the load.
    """
    copies_N = pending[0].load_KE.new_tensor([s.copies for s in pending], dtype=torch.float64)
    load_NE = torch.stack([s.load_KE.sum(0) for s in pending]) / copies_N[:, None]
    kept = (torch.stack([s.kept_KE.sum() for s in pending]) / copies_N).sum()
    tokens_N = torch.stack([s.tokens for s in pending]) / copies_N
    entropy_N = torch.stack([s.entropy for s in pending]).double()
    peak_N = load_NE.amax(1) / load_NE.mean(1).clamp(min=1e-9)
    return torch.cat([
        load_NE.sum(0),
        torch.stack([kept, tokens_N.sum(), (entropy_N * tokens_N).sum(),
                     peak_N.sum()])
    ])


def _record(collected: _Collected, sums: Tensor) -> dict[str, Any]:
    """One JSON-ready record, fields as in `LayerStats.as_dict`; see docs/observability.md for each.
    """
    e = collected.experts
    # counts of ranks that report the same tokens are shares: together whole, up to rounding
    load, kept, tokens, (
        entropy,
        peak) = sums[:e].round().tolist(), *sums[e:e + 2].round().tolist(), sums[e + 2:e +
                                                                                 4].tolist()
    calls, sent, rows, capacity, capped = sums[e + 4 : e + 9].tolist()
    losses = zip(sorted(collected.losses), sums[e + 9 :].view(-1, 2).tolist(), strict=True)
    routed = sum(load)
    return {
        "calls": int(calls),
        "tokens": int(tokens),
        "load": [int(n) for n in load],
        "max_over_mean": max(load) / (routed / e) if routed else 0.0,
        "max_over_mean_call": peak / calls,
        "dropped": int(routed - kept),
        "drop_fraction": (routed - kept) / routed if routed else 0.0,
        "unused_experts": sum(n == 0 for n in load),
        "entropy": entropy / tokens if tokens else 0.0,
        "losses": {name: total / max(count, 1) for name, (total, count) in losses},
        "bytes_sent": int(sent),
        "rows": int(rows),
        "capacity": capacity / capped if capped else None,
        # agreed, so the same on all ranks
        "layouts": collected.layouts,
        "decisions": collected.decisions,
        "exchanges": collected.exchanges,
        "routers": collected.routers,
    }
