"""Measure every combination of values of several axes on emulated clusters. A study describes its
measurement with a `Sweep`, whose variants alternate in every round on each rank.
"""

from __future__ import annotations

import itertools
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_plugin.layer import MoELayer
from moe_plugin.output import LayerStats
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.routing import finish_step
from moe_plugin.utils.messages import tracked
from scripts.emulate import EmulatedCluster

T = TypeVar("T")
Ranks = Sequence[Mapping[str, Any]]  # results of all ranks, each with `seconds` by side


@dataclass(frozen=True)
class Sweep:
    """A measurement on emulated clusters for every combination of values of several axes. All
    functions receive a cell, which contains the options of the study and one value for each axis.

    Attributes:
        axes: maps the study's options to the values of each axis.
        cluster: returns the cluster for a cell.
        rank: measures alternating variants on one rank. The result contains `seconds`: for each
            variant, the times of all timed rounds.
        row: computes a cell's table values from the cell and the results of all ranks.
    """

    axes: Callable[[Namespace], Mapping[str, Sequence[Any]]]
    cluster: Callable[[Namespace], EmulatedCluster]
    rank: Callable[[Namespace], Any]
    row: Callable[[Namespace, Ranks], dict[str, Any]]
    timeout_s: float = 600.0

    def measure(self, args: Namespace) -> list[dict[str, Any]]:
        """Measure all cells. Return their values together with their positions on the axes."""
        axes, rows = self.axes(args), []
        for values in tracked(list(itertools.product(*axes.values())), "sweep", "cell"):
            cell = dict(zip(axes, values, strict=True))
            at = Namespace(**{**vars(args), **cell})
            with self.cluster(at) as cluster:
                ranks = cluster.run(self.rank, at, timeout_s=self.timeout_s)
            rows.append({**cell, **self.row(at, ranks)})
        return rows


def alternate(sides: Mapping[str, Callable[[], T]], rounds: int,
              warm_up: int = 1) -> dict[str, list[T]]:
    """Run every variant once per round, so that background noise on the machine affects all
    variants equally. Return one result per round for each variant, without the rounds of the
    warm-up.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(warm_up + rounds):
        for name, step in sides.items():
            found[name].append(step())
    return {name: results[warm_up:] for name, results in found.items()}


def slowest(ranks: Ranks, name: str) -> list[float]:
    """For one variant, return the time of each round on the slowest rank."""
    return [max(step) for step in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]


def medians(ranks: Ranks) -> dict[str, float]:
    """For each variant, return the median time on the slowest rank."""
    return {name: statistics.median(slowest(ranks, name)) for name in ranks[0]["seconds"]}


# -- steps of a layer, timed on every rank


def timed_step(layer: MoELayer, x_TD: Tensor, choice: LayoutChoice | None,
               grad_TD: Tensor | None = None) -> tuple[float, LayerStats]:
    """Run a forward and a backward pass. All ranks start the step at the same time. `choice` is the
    layout for this call; None uses the layout that is configured or chosen by the tuner. Without
    `grad_TD`, the gradient is that of the mean square of the output.
    """
    layer.comm.barrier()
    start = time.perf_counter()
    out = layer(x_TD, choice=choice)
    (out.output if grad_TD is not None else out.output.square().mean()).backward(grad_TD)
    return time.perf_counter() - start, out.stats


def clean_step(layer: MoELayer, x_TD: Tensor, choice: LayoutChoice | None = None,
               grad_TD: Tensor | None = None) -> tuple[float, LayerStats]:
    """Run `timed_step` and then clear all gradients, to which the next variant would add."""
    found = timed_step(layer, x_TD, choice, grad_TD)
    layer.zero_grad(set_to_none=True)
    x_TD.grad = None
    return found


def one_step(layer: MoELayer, tokens: int, choice: LayoutChoice | None) -> tuple[float, str]:
    """Run `timed_step` on random tokens that differ between ranks. Return (seconds, layout)."""
    x_TD = torch.randn(tokens, layer.config.model_dim, requires_grad=True)
    seconds, stats = timed_step(layer, x_TD, choice)
    return seconds, stats.layout


def timed_end(layer: MoELayer) -> float:
    """Return the time in seconds of the end of a step, in which replicas may be placed."""
    layer.comm.barrier()
    start = time.perf_counter()
    finish_step(layer)
    return time.perf_counter() - start
