"""Reports of a run in Megatron's own training loop, in addition to the log that Megatron writes.

The reports are: the starting iteration, one JSON object per logged iteration, the path of the JSON
file at the end, and instructions for continuing a stopped run.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from moe_plugin.comm.host_collectives import comm_of, gather_objects
from moe_plugin.config import run_config
from moe_plugin.hosts.megatron.compat import aux_losses
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.observe.features import LayerRecords
from moe_plugin.observe.history.json_lines import step_record
from moe_plugin.observe.recorder import StatsRecorder
from moe_plugin.observe.sinks import JsonlSink
from moe_plugin.training.resilience.skipped_steps import FiniteSteps
from moe_plugin.training.resilience.stopping import RUN
from moe_plugin.training.run import Run
from moe_plugin.utils.regular_files import write_regular
from moe_plugin.utils.run_feature import StepFacts

logger = logging.getLogger("moe_plugin.megatron")


class ScriptReport:
    """Writes the reports of a run. The module documentation lists the reports.

    Args:
        args: dict of the script's arguments. The training loop modifies this dict.
        changed: dict of the arguments that differ from their defaults. The keys are flags, and the
            values are pairs (text as written, default).
        run: the run object with its features.
        recorder: object that collects the statistics of the layers.

    Attributes:
        evaluates: tuple with Megatron's name for the current evaluation and its iteration.
        done: number of completed steps.
    """

    def __init__(self, args: Mapping[str, Any], changed: Mapping[str, tuple[str, str]], run: Run,
                 recorder: StatsRecorder) -> None:
        self.args, self.run, self.recorder = args, run, recorder
        take_over = run_config(settings_from_flags(args)).observe.take_over_folder
        self.log = RunLog(log_path(args), take_over, dict(args), changed)
        self.total = args.get("train_iters") or 0
        self.evaluates, self.done, self._begun = ("", 0), 0, 0  # type: tuple[str, int], int, int
        self._timed = False
        self._forget(args.get("consumed_train_samples") or 0)

    def begin(self) -> None:
        """Log the iteration at which the run starts, and prepare the message that is printed if the
        run is stopped.

        Call this method after the model has been loaded.
        """
        args, done = self.args, self.args.get("iteration") or 0
        self.done = self._begun = done
        if args.get("skip_train"):
            return
        load, save = args.get("load"), args.get("save")
        same = load is not None and load == save
        RUN.resume(lambda: self.done, done if same and done else None,
                   save, "the same command" if same else f"the command with --load {save}")
        if self.total and done >= self.total:
            logger.info("the run in %s is finished: %d of --train-iters %d iterations are done. "
                        "Use a larger --train-iters to continue.", load, done, self.total)
        elif done:
            logger.info("continuing from iteration %d of %s", done, load)

    def _forget(self, samples: int) -> None:
        self._loss, self._counted = None, 0  # type: Any, int
        self._samples, self._since = samples, time.perf_counter()
        self._aux = dict[str, aux_losses.LoggedLoss]()

    def before_step(self) -> None:
        """Start the timer for the first record, once data has been read."""
        if not self._timed:
            self._since = time.perf_counter()
            self._timed = True

    def after_step(self, number: int, losses: Mapping[str, torch.Tensor], counts: bool) -> None:
        """Record the losses of a step before Megatron clears its log.

        Args:
            number: number of the step, starting at 1.
            losses: dict of losses, averaged over all ranks. Only ranks of the last pipeline stage
                have these losses.
            counts: True if the step was completed and not skipped.
        """
        self.done = number
        if counts and "lm loss" in losses:
            loss = losses["lm loss"].detach().double()
            self._loss = loss if self._loss is None else self._loss + loss
            self._counted += 1
        for name, entry in aux_losses.logged_losses().items() if counts else ():
            before = self._aux.get(name)
            values = entry.values.clone() if before is None else before.values + entry.values
            self._aux[name] = replace(entry, values=values)

    def after_log(self, iteration: int, rate: float | None, scale: float,
                  norm: float | None) -> None:
        """Write a record every `--log-interval` iterations and after the last iteration. This is a
        collective operation.
        """
        args = self.args
        if iteration % args["log_interval"] and iteration != self.total:
            return
        samples, seconds = args["consumed_train_samples"], time.perf_counter() - self._since
        made = samples - self._samples
        tokens = made * args["seq_length"]
        microbatches = made // (args["micro_batch_size"] * ps.get_data_parallel_world_size())
        lm_loss = of_last_stage(None if self._loss is None else float(self._loss) / self._counted)
        record = {
            "iteration": iteration, "consumed_samples": samples, "lm_loss": lm_loss,
            **skipped(self.run), "lr": rate, "loss_scale": float(scale),
            "grad_norm": None if norm is None else float(norm),
            "tokens_per_s": tokens / seconds, "seconds": seconds,
            "aux_losses": reduced(self._aux, max(1, microbatches)),
            "balance": balance(layer_records(
                self.recorder, iteration, finds=self.run.find(LayerRecords) is None)),
            **self.run.numbers(),
        }
        self.log.write(record)
        if dist.get_rank() == 0:
            rows = list(record["balance"].values())
            dropped = sum(row["drop_fraction"] for row in rows) / len(rows) if rows else None
            self.run.after_log(StepFacts(iteration, dropped=dropped,
                                         logged=step_record(record)[0]))
        self._forget(samples)

    def after_evaluation(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Record the loss of an evaluation on the validation set. This is a collective operation.

        losses: dict of losses, averaged over all ranks. Only ranks of the last pipeline stage have
            these losses.
        """
        loss, evaluated = losses.get("lm loss"), self.run.evaluated()
        value = of_last_stage(None if loss is None else float(loss))
        prefix, step = self.evaluates
        if value is not None and "test set" not in prefix:
            self.log.write({"iteration": step, "valid_loss": value, **evaluated})

    def saved(self, iteration: int) -> None:
        """Record that the checkpoint of an iteration is complete."""
        RUN.saved = iteration

    def close(self) -> None:
        """Log that all steps are complete, and close the log file."""
        if self.done == self.total > self._begun:
            logger.info("all %d iterations are done%s", self.total,
                        f"; losses and balance: {path}" if (path := log_path(self.args)) else "")
        self.log.close()


def of_last_stage(value: float | None) -> float | None:
    """Return a value that only ranks of the last pipeline stage have, or None if no rank has it."""
    by_stage = gather_objects(value, "the loss", ps.get_pipeline_model_parallel_group())
    return next((each for each in reversed(by_stage) if each is not None), None)


def reduced(here: Mapping[str, aux_losses.LoggedLoss], microbatches: int) -> dict[str, list[float]]:
    """Average auxiliary losses over micro-batches and all ranks. Return a dict that maps the name
    of each loss to a list with one value per layer.

    This is a collective operation, so all ranks must call this method. The ranks first exchange the
    names of their losses, because a pipeline stage may have no losses. A loss that is zero in all
    layers is left out, for example a loss whose weight is zero.

    Args:
        here: sums of the losses over the micro-batches on the current rank.
        microbatches: number of micro-batches in each sum.
    """
    names = gather_objects({name: entry.values.numel() for name, entry in here.items()},
                           "the auxiliary losses' names")
    sizes = {name: size for each in names for name, size in each.items()}
    losses_by_name, device = {}, comm_of().device
    for name in sorted(sizes):
        entry = here.get(name)
        values = entry.values.clone() if entry else torch.zeros(sizes[name], device=device)
        data = ps.get_data_parallel_group()
        reduce_groups = [entry.reduce_group] if entry and entry.reduce_group is not None else []
        for group in (*reduce_groups, data):
            values = comm_of(group).all_reduce(values)
        # stages may have different numbers of replicas
        values = comm_of(ps.get_pipeline_model_parallel_group()).all_reduce(values / data.size())
        if values.any():  # Megatron's log contains zeros for losses that no layer adds
            losses_by_name[name] = (values / microbatches).tolist()
    return losses_by_name


def skipped(run: Run) -> dict[str, int]:
    """Return a dict with the numbers of skipped steps.

    "skipped_steps" counts all steps that have been skipped so far. "not_finite" counts the steps
    since the last record that were skipped without reducing the loss scale.
    """
    finite = run.find(FiniteSteps)
    assert finite is not None
    return {"skipped_steps": finite.skipped, "not_finite": finite.take_unscaled()}


def log_path(args: Mapping[str, Any]) -> str | None:
    """Return the path of the log from `log_file` and `save`, or None if no log is written."""
    save = args.get("save")
    return args.get("log_file") or (os.path.join(save, "log.jsonl") if save else None)


def layer_records(recorder: StatsRecorder, iteration: int,
                  finds: bool = True) -> dict[str, Any]:
    """Return the statistics records of all layers on all pipeline stages since the last call, as a
    dict. This is a collective operation.

    finds: True to search the records for problems and log them.
    """
    sums = recorder.reduce()
    recorder.write(iteration, sums)
    by_stage = gather_objects(sums, "the layers' records", ps.get_pipeline_model_parallel_group())
    records = {layer: record for stage in by_stage for layer, record in stage.items()}
    if finds and dist.get_rank() == 0:  # only this rank writes a log
        recorder.health.add(iteration, records)
    return records


def balance(records: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the metrics of the layers' records that each log line contains."""
    return {layer: {key: row[key] for key in ("max_over_mean", "drop_fraction", "unused_experts",
                                              "entropy")} for layer, row in records.items()}


class RunLog:
    """Writes the JSONL log file. Only rank 0 writes.

    Args:
        take_over: see `JsonlSink`.
        settings: dict of the settings of the run. The settings are written to `settings.json` in
            the same folder. The report reads this file.
        changed: dict of the settings that the user chose, with values (text as written, default).
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
        """Append one line. When this method returns, the line has been written to disk."""
        if self._sink is not None:
            self._sink.write(record)

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
