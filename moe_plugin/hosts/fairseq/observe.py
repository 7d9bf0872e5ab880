"""Statistics of the MoE layers to the files of `--moe-stats-jsonl` and `--moe-stats-tensorboard`
(fairseq's log has its own metrics), and a line after the first step.
"""

from __future__ import annotations

import functools
import logging
import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from fairseq.data.iterators import EpochBatchIterator
from fairseq.logging import metrics
from torch import nn

from moe_plugin.comm import LocalComm
from moe_plugin.comm.named_errors import comm_of
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.observe import StatsRecorder, first_step
from moe_plugin.observe.drops import RULE
from moe_plugin.observe.history.fairseq_log import skipped_step, step_record
from moe_plugin.observe.timeline import StepTimeline
from moe_plugin.output import LayerStats
from moe_plugin.routing.replay import replaying

logger = logging.getLogger(__name__)
INNER = "train_inner"  # fairseq's name of the numbers between two lines of its log


class Observer:
    """Connects every MoE layer of a model to one recorder.

    Args:
        model: its layers are named by their place, `decoder.layers.1`.
        group: the data-parallel group; None: this process alone.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        layers = moe_layers(model)
        self.config = layers[0].moe_layer.moe.config.observe
        self.recorder = StatsRecorder(self.config,
                                      LocalComm() if group is None else comm_of(group),
                                      skip=[RULE], host="fairseq")
        names = {id(module): name for name, module in model.named_modules()}
        self.timeline = StepTimeline(self.config,
                                     {names[id(layer)]: layer.moe_layer for layer in layers},
                                     self.recorder.comm, health=self.recorder.health)
        for layer in layers:
            layer.moe_layer.observer = functools.partial(self._add, names[id(layer)])

    def _add(self, name: str, stats: LayerStats) -> None:
        # where activations are recomputed a layer runs twice per step: one pass is counted, of
        # reentrant checkpoints the second, because the first is without gradients
        if torch.is_grad_enabled() and not replaying():
            self.recorder.add(name, stats)

    def around_step(self, update: int) -> AbstractContextManager[None]:
        """Around the work of an optimizer step (counted from 1).

        Records the timeline where the settings ask for it.
        """
        return self.timeline.around(update)

    def after_step(self, updates: int, log_interval: int) -> None:
        """Call it on every rank after an optimizer step.

        Every `observe.interval` updates it writes a record per layer; every `log_interval` updates
        the findings take the numbers that fairseq logs next.
        """
        if updates % self.config.interval == 0:
            self.recorder.flush(updates)
        known = metrics.get_meters(INNER)
        if updates % log_interval == 0 and known is not None and self.recorder.comm.rank == 0:
            record = step_record(known.get_smoothed_values(), INNER)
            if record is not None:
                self.recorder.health.add_step(record)
                self.recorder.plot(record)

    def skipped(self, update: int) -> None:
        """Call it where a step is skipped because its gradients are not finite."""
        if self.recorder.comm.rank == 0:
            self.recorder.health.add_step(skipped_step(update))


def observer(model: nn.Module, group: Any) -> Observer | None:
    """An observer where the settings say where statistics go."""
    layers = moe_layers(model)
    config = layers[0].moe_layer.moe.config.observe if layers else None
    return Observer(model, group) if config is not None and config.writes else None


class FirstStep:
    """Says once, at once, how long a step takes and the run will take.

    Args:
        cfg: fairseq's settings.
    """

    def __init__(self, cfg: Any) -> None:
        self._optimization, self._batches, self._said = cfg.optimization, 0, False

    def epoch(self, batches: Any) -> None:
        """Take the batches of an epoch, which say how long it is."""
        if isinstance(batches, EpochBatchIterator):
            self._batches = len(batches)

    def __call__(self, seconds: float, updates: int) -> None:
        """Call it on the rank that has the log after a step. updates: made, resumed ones included.
        """
        words = metrics.get_meter("default", "wpb")
        if self._said or words is None or not words.val:
            return
        self._said, total = True, self.total()
        left = None if total is None else max(0, total - updates)
        logger.info("%s", first_step(seconds, float(words.val), left))

    def total(self) -> int | None:
        """Updates of the whole run by `--max-update` and `--max-epoch`; None: neither tells."""
        settings, ends = self._optimization, []
        if settings.max_update:
            ends.append(settings.max_update)
        if settings.max_epoch and self._batches:
            every = list(settings.update_freq)  # by epoch; the last one counts for all that follow
            every += every[-1:] * (settings.max_epoch - len(every))
            ends.append(sum(math.ceil(self._batches / n) for n in every[:settings.max_epoch]))
        return min(ends, default=None)
