"""Recorded choices where a micro-batch has several passes of one layer: slices of its sequences, or
the depths of multi-token prediction with one repeated layer.

Recomputations take the oldest recording first (`moe_plugin.routing.replay`), as micro-batches go
backward in the order in which they went forward. Several passes of one micro-batch go backward last
to first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.layer import layers_in
from moe_plugin.routing.contract import RouterModule
from moe_plugin.routing.replay import ReplayLog
from moe_plugin.tuning.layout_tuner import LayoutTuner


class Recordings:
    """Puts recordings into the order of backward passes; nothing where nothing is recomputed.

    Args:
        model: with layers of ours, or one of them.
        config: `TransformerConfig`.
    """

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        self._logs = _logs(model) if recomputes(config) else []
        self._counts: list[list[int]] = []

    @contextmanager
    def of_forward(self, number: int, passes: int) -> Iterator[None]:
        """Around forward pass `number` of so many of a micro-batch."""
        before = [len(log.records) for log in self._logs]
        yield
        if number == 0:
            self._counts = [[] for _ in self._logs]
        for log, count, counts in zip(self._logs, before, self._counts, strict=True):
            counts.append(len(log.records) - count)
            if number == passes - 1:
                log.reverse_recent_calls(counts)

    @contextmanager
    def of_next(self, passes: int) -> Iterator[None]:
        """Around the next forward pass, of so many of each micro-batch."""
        done = len(self._counts[0]) % passes if self._counts else 0
        if any(len(log.records) < sum(counts)
               for log, counts in zip(self._logs, self._counts, strict=False)):
            done = 0  # they were dropped after a failed step
        with self.of_forward(done, passes):
            yield


def recomputes(config: Any) -> bool:
    """Whether activations are recomputed."""
    return setting(config, "recompute_granularity") is not None


def _logs(model: torch.nn.Module) -> list[ReplayLog]:
    found = [m.recordings for m in model.modules() if isinstance(m, RouterModule)]
    tuners = [layer.layouts.tuner for layer in layers_in(model)]
    return found + [tuner.recordings for tuner in tuners if isinstance(tuner, LayoutTuner)]
