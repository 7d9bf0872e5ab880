"""Measure every combination of values of several axes on emulated clusters. Each measurement
compares several variants, which alternate in every round.

A study that runs on emulated clusters describes its measurement with a `Sweep`. On every rank, a
`Sweep` runs a function that builds the variants and measures them with `alternate`. The result of
this function contains `seconds`: for each variant, the times of all timed rounds on this rank. The
template of the study's page defines the columns of its tables (see `report`).
"""

from __future__ import annotations

import itertools
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_plugin.comm import Comm
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
    """A measurement on emulated clusters for every combination of values of several axes.

    All functions of a `Sweep` receive a cell, which contains the options of the study and one value
    for each axis.

    Attributes:
        axes: function that maps the study's options to a mapping from the names of the axes to
            their values.
        cluster: function that returns the cluster for a cell.
        rank: function that measures alternating variants on one rank.
        row: function that computes a cell's table values from the cell and the results of all
            ranks.
        timeout_s: time in seconds after which the ranks of a cell are stopped.
        group_timeout_s: timeout of collectives in seconds.
    """

    axes: Callable[[Namespace], Mapping[str, Sequence[Any]]]
    cluster: Callable[[Namespace], EmulatedCluster]
    rank: Callable[[Namespace], Any]
    row: Callable[[Namespace, Ranks], dict[str, Any]]
    timeout_s: float = 600.0
    group_timeout_s: float = 60.0

    def measure(self, args: Namespace) -> list[dict[str, Any]]:
        """Measure all cells. Return the values of each cell together with its position on the axes.
        """
        axes, rows = self.axes(args), []
        for values in tracked(list(itertools.product(*axes.values())), "sweep", "cell"):
            cell = dict(zip(axes, values, strict=True))
            at = Namespace(**{**vars(args), **cell})
            with self.cluster(at) as cluster:
                ranks = cluster.run(self.rank, at, timeout_s=self.timeout_s,
                                    group_timeout_s=self.group_timeout_s)
            rows.append({**cell, **self.row(at, ranks)})
        return rows


def alternate(sides: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1,
              rotate: bool = False) -> dict[str, list[T]]:
    """Run every variant once per round, so that background noise on the machine affects all
    variants equally.

    Args:
        sides: for each variant, a function that runs one step.
        rounds: number of rounds whose results are returned.
        warm_up: number of rounds before the rounds whose results are returned.
        rotate: whether every round begins with another variant, so that each variant is first,
            second and last equally often.

    Returns: For each variant, a list with one result per round.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(warm_up + rounds):
        turn = number % len(names) if rotate else 0
        for name in (*names[turn:], *names[:turn]):
            found[name].append(sides[name]())
    return {name: results[warm_up:] for name, results in found.items()}


def timed(comm: Comm, work: Callable[[], object]) -> float:
    """Call `work`, which all ranks of `comm` start at the same time. Return its duration on this
    rank in seconds.
    """
    comm.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def slowest(ranks: Ranks, name: str) -> list[float]:
    """For one variant, return the time of each round on the slowest rank."""
    return [max(step) for step in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]


def medians(ranks: Ranks) -> dict[str, float]:
    """For each variant, return the median time on the slowest rank."""
    return {name: statistics.median(slowest(ranks, name)) for name in ranks[0]["seconds"]}


# -- steps of a layer, timed on every rank


def timed_step(layer: MoELayer, x_TD: Tensor, choice: LayoutChoice | None,
               grad_TD: Tensor | None = None) -> tuple[float, LayerStats]:
    """Run a forward and a backward pass. All ranks start the step at the same time.

    Args:
        layer: the layer.
        x_TD: tokens of this rank [T, D].
        choice: layout for this call. None uses the layout that is configured or chosen by the
            tuner.
        grad_TD: gradient of the output. None uses the gradient of the mean square of the output.
    """
    layer.comm.barrier()
    start = time.perf_counter()
    out = layer(x_TD, choice=choice)
    (out.output if grad_TD is not None else out.output.square().mean()).backward(grad_TD)
    return time.perf_counter() - start, out.stats


def clean_step(layer: MoELayer, x_TD: Tensor, choice: LayoutChoice | None = None,
               grad_TD: Tensor | None = None) -> tuple[float, LayerStats]:
    """Run `timed_step` and then clear all gradients. Otherwise, the next variant would accumulate
    into these gradients.
    """
    found = timed_step(layer, x_TD, choice, grad_TD)
    layer.zero_grad(set_to_none=True)
    x_TD.grad = None
    return found


def one_step(layer: MoELayer, tokens: int, choice: LayoutChoice | None) -> tuple[float, str]:
    """Run `timed_step` on random tokens that differ between ranks. Return the time of the step in
    seconds, and its layout.
    """
    x_TD = torch.randn(tokens, layer.config.model_dim, requires_grad=True)
    seconds, stats = timed_step(layer, x_TD, choice)
    return seconds, stats.layout


def timed_end(layer: MoELayer) -> float:
    """Measure the end of a step, in which replicas may be placed, and return the time in seconds.
     All ranks start at the same time.
    """
    return timed(layer.comm, partial(finish_step, layer))
