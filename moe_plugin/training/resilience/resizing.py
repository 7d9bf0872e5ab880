"""Change the expert-parallel size between two steps of a run (`resize.expert_parallel_at`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from moe_plugin.checkpoint.resize import check_sizes
from moe_plugin.comm.base import Comm
from moe_plugin.config import RunConfig
from moe_plugin.observe.history.records import ResizeRecord
from moe_plugin.observe.sinks import JsonlSink
from moe_plugin.utils.machine import wait_for_device
from moe_plugin.utils.run_feature import RunFeature, StepInput

logger = logging.getLogger(__name__)


class ExpertParallelSteps(RunFeature):
    """A run feature that sets the expert-parallel size before each step.

    The size is also set before the first step after loading a checkpoint, because the checkpoint
    may have been written with a different size.

    Args:
        config: settings of the run. The sizes are in its section `resize`, and `observe.jsonl` is
            the path of the file in which changes are recorded.
        size: expert-parallel size with which the run was built. The run uses this size until the
            first change.
        change: function that adapts groups, layers, optimizer and gradient reduction to a new size
            by calling `checkpoint.resize.change_expert_parallel`. All ranks must call this
            function.
        world: data-parallel ranks. Rank 0 records the changes in the file.
        host: name of the host framework that trains the model.
    """

    def __init__(self, config: RunConfig, size: int, change: Callable[[int], None], world: Comm,
                 host: str) -> None:
        self.resize, self.jsonl = config.resize, config.observe.jsonl
        self.built = self.size = size
        self.change, self.world, self.host = change, world, host

    def around_step(self, step: StepInput) -> AbstractContextManager[Any]:
        """Change the expert-parallel size before the step starts, if a change is due."""
        wanted = self.resize.size_at(step.number, self.built)
        if wanted != self.size:
            self._change(step.number, wanted)
        return nullcontext()

    def _change(self, number: int, wanted: int) -> None:
        world, begun, sent = self.world, time.perf_counter(), self.world.bytes_sent
        self.change(wanted)
        wait_for_device(world.device)
        sent_bytes = world.bytes_sent - sent
        seconds = world.agree_max([time.perf_counter() - begun])[0]
        sent_1 = torch.tensor([sent_bytes], dtype=torch.int64, device=world.device)
        record = ResizeRecord(step=number, host=self.host, before=self.size, after=wanted,
                              bytes=int(world.all_reduce(sent_1)), seconds=seconds)
        self.size = wanted
        if world.rank:
            return
        logger.info("%s", record.line())
        if self.jsonl is not None:
            sink = JsonlSink(self.jsonl)
            sink.write(record.as_row())
            sink.close()


def expert_parallel_steps(config: RunConfig, models: Iterable[nn.Module], size: int,
                          change: Callable[[int], None], world: Comm,
                          host: str) -> ExpertParallelSteps | None:
    """Return the feature that changes the expert-parallel size of a run, or None if no changes are
    requested.

    Args:
        config: see `ExpertParallelSteps`.
        models: the parts of the model on this rank.
        size: see `ExpertParallelSteps`.
        change: see `ExpertParallelSteps`.
        world: see `ExpertParallelSteps`.
        host: see `ExpertParallelSteps`.
    Raises:
        ValueError: If a size is not compatible with the number of ranks or with a layer. The error
            message contains the name of the setting.
    """
    if not config.resize.expert_parallel_at:
        return None
    for model in models:
        check_sizes(model, config.resize.expert_parallel_at, world.size)
    return ExpertParallelSteps(config, size, change, world, host)
