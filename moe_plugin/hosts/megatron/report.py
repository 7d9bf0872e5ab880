"""What a training run tells: a progress bar on a terminal, lines in the log, one JSON object a
logged iteration.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from moe_plugin.comm.host_collectives import comm_of, gather_objects
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.observe.history.json_lines import step_record
from moe_plugin.observe.recorder import StatsRecorder
from moe_plugin.observe.sinks import JsonlSink
from moe_plugin.planner.units import show_time
from moe_plugin.regular_files import write_regular
from moe_plugin.resilience.finite import FiniteSteps
from moe_plugin.run import Run, StepFacts

logger = logging.getLogger("moe_plugin.megatron")


def reduced(here: Mapping[str, core.LoggedLoss], microbatches: int) -> dict[str, list[float]]:
    """Auxiliary losses by name and layer over all ranks, the mean over micro-batches.

    A collective call: all ranks agree on the names first, because a pipeline stage may have none.
    A loss that is zero in all layers, one of weight zero, is left out.

    Args:
        here: sums of this rank over so many micro-batches.
    """
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
        if values.any():  # Megatron's log holds zeros of losses that no layer adds
            found[name] = (values / microbatches).tolist()
    return found


def skipped(run: Run) -> dict[str, int]:
    """Steps that were skipped so far, and since the last record those by which no loss scale fell.
    """
    finite = run.find(FiniteSteps)
    assert finite is not None
    return {"skipped_steps": finite.skipped, "not_finite": finite.take_unscaled()}


def log_path(args: Mapping[str, Any]) -> str | None:
    """Where the log goes, by the arguments `log_file` and `save`; None: there is none."""
    save = args.get("save")
    return args.get("log_file") or (os.path.join(save, "log.jsonl") if save else None)


def layer_records(recorder: StatsRecorder, iteration: int,
                  finds: bool = True) -> dict[str, Any]:
    """Records by layer of all pipeline stages since the last call; a collective call.

    finds: whether to look for what is wrong, and say it.
    """
    mine = recorder.reduce()
    recorder.write(iteration, mine)
    found = gather_objects(mine, "the layers' records", ps.get_pipeline_model_parallel_group())
    records = {layer: record for stage in found for layer, record in stage.items()}
    if finds and dist.get_rank() == 0:  # the one that has a log
        recorder.health.add(iteration, records)
    return records


def balance(records: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What a line of the log has of them."""
    return {layer: {key: row[key] for key in ("max_over_mean", "drop_fraction", "unused_experts",
                                              "entropy")} for layer, row in records.items()}


def tell(record: dict[str, Any], log: RunLog, run: Run, total: int, left_s: float) -> None:
    """Write a record to the log, a line of it, and what its features make of it.

    Args: see `line`.
    """
    log.write(record)
    logger.info("%s", line(record, total, left_s))
    if dist.get_rank() == 0:
        rows = list(record["balance"].values())
        dropped = sum(row["drop_fraction"] for row in rows) / len(rows) if rows else None
        run.after_log(StepFacts(record["iteration"], dropped=dropped,
                                logged=step_record(record)[0]))


class RunLog:
    """Rank 0's JSONL file; other ranks have none.

    Args:
        take_over: see `JsonlSink`.
        settings: written next to it as `settings.json`, for the report.
        changed: (as written, default) of those that the user chose.
    """

    def __init__(self, path: str | None, take_over: bool = False,
                 settings: dict[str, Any] | None = None,
                 changed: Mapping[str, tuple[str, str]] | None = None) -> None:
        self._sink = None
        if path and dist.get_rank() == 0:
            self._sink = JsonlSink(path, "log_file", take_over)
            if settings is not None:
                row = {"host": "megatron", "settings": settings, "changed": changed or {}}
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
    # a rank without an optimizer's group has no learning rate
    rate = "-" if record["lr"] is None else f"{record['lr']:.3e}"
    text = (f"iteration {record['iteration']}/{total} | lm loss {loss} | "
            f"{record['tokens_per_s']:.0f} tokens/s | lr {rate}")
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
