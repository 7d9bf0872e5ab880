"""What a training run tells: a progress bar on a terminal, lines in the log, one JSON object a
logged iteration.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.comm.named_errors import comm_of, gather_objects
from moe_plugin.config import ObserveConfig
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.layer import PluginMoELayer
from moe_plugin.memory.activations.offload import Activations
from moe_plugin.observe import StatsRecorder
from moe_plugin.observe.drops import DropCount
from moe_plugin.observe.history.json_lines import step_record
from moe_plugin.observe.sinks import JsonlSink
from moe_plugin.observe.timeline import StepTimeline
from moe_plugin.output import LayerStats
from moe_plugin.planner.units import show_time
from moe_plugin.regular_files import write_regular

logger = logging.getLogger(__name__)


def auxiliary_losses(microbatches: int) -> dict[str, list[float]]:
    """Megatron's log of auxiliary losses by name and layer; empties the log.

    Reduced over ranks, the mean over micro-batches.

    A collective call: all ranks agree on the names first, because a pipeline stage may have none.
    """
    from megatron.core import parallel_state as ps

    here = core.logged_losses()
    names = gather_objects({name: entry.values.numel() for name, entry in here.items()},
                           "the auxiliary losses' names")
    sizes = {name: size for each in names for name, size in each.items()}
    found = {}
    for name in sorted(sizes):
        entry = here.get(name)
        values = entry.values.clone() if entry else torch.zeros(sizes[name], device=_device())
        data = ps.get_data_parallel_group()
        own = [entry.reduce_group] if entry and entry.reduce_group is not None else []
        for group in (*own, data):
            values = comm_of(group).all_reduce(values)
        # stages may have different numbers of replicas
        values = comm_of(ps.get_pipeline_model_parallel_group()).all_reduce(values / data.size())
        found[name] = (values / microbatches).tolist()
    core.set_logged_losses({})
    return found


def _device() -> torch.device:
    return torch.device(
        "cuda",
        torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


class Observer:
    """Collects `LayerStats` from every layer of this pipeline stage and makes records of them.

    Args:
        layers: of this stage; they are connected.
        config: our `observe` settings: further files for the same records.
        activations: of this stage, whose copies get records, too; None: all are kept.
        skip: findings that somebody else warns of.
    """

    def __init__(self, layers: Sequence[PluginMoELayer], config: ObserveConfig,
                 activations: Activations | None = None, skip: Sequence[str] = ()) -> None:
        from megatron.core import parallel_state as ps

        self.layers, self.config = list(layers), config
        group = ps.get_tensor_and_data_parallel_group(with_context_parallel=True)
        stage = ps.get_pipeline_model_parallel_rank()
        if stage:  # one writer a file: later stages write their own
            config = replace(config, jsonl=config.jsonl and f"{config.jsonl}.stage{stage}")
        self.recorder = StatsRecorder(config, comm_of(group), skip, host="megatron")
        if activations is not None:
            self.recorder.watch("activations", activations.swapper.copier,
                                activations.on_device)
        self.timeline = StepTimeline(config,
                                     {f"layer{layer.layer_number}": layer for layer in self.layers},
                                     self.recorder.comm, dist.get_rank(), self.recorder.health)
        self.validation = DropCount()  # of this rank and stage
        for layer in self.layers:
            layer.observer = functools.partial(self._add, layer)

    def _add(self, layer: PluginMoELayer, stats: LayerStats) -> None:
        if layer.training:  # the records are of training
            self.recorder.add(f"layer{layer.layer_number}", stats)
        else:
            self.validation.add(stats)

    def after_step(self, step: int) -> None:
        """Write a record of each layer at the end of an interval; a collective call of the stage.

        step: counted from 1.
        """
        if step % self.config.interval == 0:
            self.recorder.flush(step)

    def records(self, iteration: int) -> dict[str, Any]:
        """Records by layer of all pipeline stages since the last call; a collective call."""
        from megatron.core import parallel_state as ps

        mine = self.recorder.reduce()
        self.recorder.write(iteration, mine)
        found = gather_objects(mine, "the layers' records", ps.get_pipeline_model_parallel_group())
        records = {layer: record for stage in found for layer, record in stage.items()}
        if dist.get_rank() == 0:  # the one that has a log
            self.recorder.health.add(iteration, records)
        return records

    def logged(self, record: dict[str, Any]) -> None:
        """Take a record of the training log of rank 0, for the findings and plots."""
        step = step_record(record)[0]
        self.recorder.health.add_step(step)
        self.recorder.plot(step)


class RunLog:
    """Rank 0's JSONL file; other ranks have none.

    settings: written next to it as `settings.json`, for the report. defaults: of those that differ
    from them.
    """

    def __init__(self, path: str | None, settings: dict[str, Any] | None = None,
                 defaults: dict[str, Any] | None = None) -> None:
        self._sink = None
        if path and dist.get_rank() == 0:
            self._sink = JsonlSink(path, "log_file")
            if settings is not None:
                row = {"host": "megatron", "settings": settings, "defaults": defaults or {}}
                write_regular(
                    os.path.join(os.path.dirname(os.path.abspath(path)), "settings.json"),
                    json.dumps(row, default=str) + "\n")

    def write(self, record: dict[str, Any]) -> None:
        """Append one line, on disk when this returns."""
        if self._sink is not None:
            self._sink.write(record)

    def close(self) -> None:
        """Close the file."""
        if self._sink is not None:
            self._sink.close()


def line(record: dict[str, Any], total: int, left_s: float) -> str:
    """One record for people. total: iterations of the run. left_s: seconds that the rest takes."""
    loss = "-" if record["lm_loss"] is None else f"{record['lm_loss']:.4f}"
    text = (f"iteration {record['iteration']}/{total} | lm loss {loss} | "
            f"{record['tokens_per_s']:.0f} tokens/s | lr {record['lr']:.3e}")
    if "oracle_error" in record:
        text += f" | oracle error {record['oracle_error']:.3f}, top-1 {record['top1_error']:.3f}"
    if record.get("grad_norm") is not None:
        text += f" | grad norm {record['grad_norm']:.3f}"
    if record["skipped_steps"]:
        text += f" | skipped steps {record['skipped_steps']}"
    for name, values in record["aux_losses"].items():
        text += f" | {name} {sum(values) / max(1, sum(v != 0 for v in values)):.4f}"
    if record["balance"]:
        text += (" | expert max/mean "
                 f"{max(row['max_over_mean'] for row in record['balance'].values()):.2f}")
    return text + (f" | {show_time(left_s)} left" if left_s else "")
