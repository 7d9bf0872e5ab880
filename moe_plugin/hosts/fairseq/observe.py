"""Statistics of the MoE layers to the files of `--moe-stats-jsonl` and `--moe-stats-tensorboard`
(fairseq's log has its own metrics).
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from moe_plugin.comm import LocalComm
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.plain.named_errors import comm_of
from moe_plugin.observe import StatsRecorder
from moe_plugin.observe.timeline import Timeline
from moe_plugin.records import LayerStats


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
                                      LocalComm() if group is None else comm_of(group))
        names = {id(module): name for name, module in model.named_modules()}
        self.timeline = Timeline(self.config,
                                 {names[id(layer)]: layer.moe_layer for layer in layers},
                                 self.recorder.comm)
        for layer in layers:
            layer.moe_layer.observer = functools.partial(self._add, names[id(layer)])

    def _add(self, name: str, stats: LayerStats) -> None:
        # under activation checkpointing a layer runs twice per step, the first time without
        # gradients: that pass is not counted
        if torch.is_grad_enabled():
            self.recorder.add(name, stats)

    def around_step(self, update: int) -> AbstractContextManager[None]:
        """Around the work of an optimizer step (counted from 1).

        Records the timeline where the settings ask for it.
        """
        return self.timeline.around(update)

    def after_step(self, updates: int) -> None:
        """Call it on every rank after an optimizer step.

        Every `observe.interval` updates it writes a record per layer.
        """
        if updates % self.config.interval == 0:
            self.recorder.flush(updates)


def observer(model: nn.Module, group: Any) -> Observer | None:
    """An observer where the settings name a file to write to."""
    layers = moe_layers(model)
    config = layers[0].moe_layer.moe.config.observe if layers else None
    return Observer(model,
                    group) if config is not None and (config.jsonl or config.tensorboard) else None
