"""Measure every combination of some axes on emulated clusters, with sides that alternate.

A study that runs on emulated clusters describes its measurement by a `Sweep`. The function that a
`Sweep` runs on every rank builds the sides and measures them with `alternate`. Its result has
`seconds`: for each side, the time of every timed round on this rank. The columns of the cells are
in the template of the study's page (see `report`).
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
    """A measurement on an emulated cluster for every combination of some axes.

    All functions receive a cell: the options of the study, and one value of each axis.

    Attributes:
        axes: function from the study's options to the values of each axis by its name.
        cluster: function that returns the cluster of a cell.
        rank: function that measures on one rank, with alternating sides.
        row: function from a cell and the results of all ranks to the numbers of the cell.
        timeout_s: seconds after which the ranks of a cell are stopped.
    """

    axes: Callable[[Namespace], Mapping[str, Sequence[Any]]]
    cluster: Callable[[Namespace], EmulatedCluster]
    rank: Callable[[Namespace], Any]
    row: Callable[[Namespace, Ranks], dict[str, Any]]
    timeout_s: float = 600.0

    def measure(self, args: Namespace) -> list[dict[str, Any]]:
        """Return the numbers of all cells, each with its values of the axes."""
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
    """Run every side once per round, so that a slow phase of the machine affects all of them.

    Args:
        sides: function that runs one step of a side, by the side's name.
        rounds: number of rounds whose results are returned.
        warm_up: number of rounds before these.

    Returns:
        The results of each side, one per round.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(warm_up + rounds):
        for name, step in sides.items():
            found[name].append(step())
    return {name: results[warm_up:] for name, results in found.items()}


def slowest(ranks: Ranks, name: str) -> list[float]:
    """Return the time of each round of a side on the slowest rank."""
    return [max(step) for step in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]


def medians(ranks: Ranks) -> dict[str, float]:
    """Return the median time of each side on the slowest rank."""
    return {name: statistics.median(slowest(ranks, name)) for name in ranks[0]["seconds"]}


# -- steps of a layer, timed on every rank


def timed_step(layer: MoELayer, x_TD: Tensor, choice: LayoutChoice | None,
               grad_TD: Tensor | None = None) -> tuple[float, LayerStats]:
    """Run one forward and one backward pass, which all ranks start at the same time.

    Args:
        layer: the layer.
        x_TD: tokens of this rank.
        choice: layout of the call. None uses the configured or tuned layout.
        grad_TD: gradient of the output. None uses the gradient of the output's mean square.
    """
    layer.comm.barrier()
    start = time.perf_counter()
    out = layer(x_TD, choice=choice)
    (out.output if grad_TD is not None else out.output.square().mean()).backward(grad_TD)
    return time.perf_counter() - start, out.stats


def clean_step(layer: MoELayer, x_TD: Tensor, choice: LayoutChoice | None = None,
               grad_TD: Tensor | None = None) -> tuple[float, LayerStats]:
    """Run `timed_step`, and remove the gradients, to which the next side would add otherwise."""
    found = timed_step(layer, x_TD, choice, grad_TD)
    layer.zero_grad(set_to_none=True)
    x_TD.grad = None
    return found


def one_step(layer: MoELayer, tokens: int, choice: LayoutChoice | None) -> tuple[float, str]:
    """Run `timed_step` on random tokens of each rank; return its seconds and its layout."""
    x_TD = torch.randn(tokens, layer.config.model_dim, requires_grad=True)
    seconds, stats = timed_step(layer, x_TD, choice)
    return seconds, stats.layout


def timed_end(layer: MoELayer) -> float:
    """Return the seconds of the end of a step, in which replicas may be placed. All ranks start
    together.
    """
    layer.comm.barrier()
    start = time.perf_counter()
    finish_step(layer)
    return time.perf_counter() - start
