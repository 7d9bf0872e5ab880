"""What a training run tells: a progress bar on a terminal, lines in the log, one JSON object a
logged iteration.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from moe_plugin.comm.host_collectives import comm_of, gather_objects
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.observe.sinks import JsonlSink
from moe_plugin.planner.units import show_time
from moe_plugin.regular_files import write_regular

logger = logging.getLogger(__name__)


def auxiliary_losses(microbatches: int) -> dict[str, list[float]]:
    """Megatron's log of auxiliary losses by name and layer; empties the log.

    Reduced over ranks, the mean over micro-batches.

    A collective call: all ranks agree on the names first, because a pipeline stage may have none.
    """
    here = core.logged_losses()
    names = gather_objects({name: entry.values.numel() for name, entry in here.items()},
                           "the auxiliary losses' names")
    sizes = {name: size for each in names for name, size in each.items()}
    found, device = {}, comm_of().device
    for name in sorted(sizes):
        entry = here.get(name)
        values = entry.values.clone() if entry else torch.zeros(sizes[name], device=device)
        data = ps.get_data_parallel_group()
        own = [entry.reduce_group] if entry and entry.reduce_group is not None else []
        for group in (*own, data):
            values = comm_of(group).all_reduce(values)
        # stages may have different numbers of replicas
        values = comm_of(ps.get_pipeline_model_parallel_group()).all_reduce(values / data.size())
        found[name] = (values / microbatches).tolist()
    core.set_logged_losses({})
    return found


class RunLog:
    """Rank 0's JSONL file; other ranks have none.

    Args:
        settings: written next to it as `settings.json`, for the report.
        defaults: of those that differ from them.
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
    """One record for people.

    Args:
        total: iterations of the run.
        left_s: seconds that the rest takes.
    """
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
