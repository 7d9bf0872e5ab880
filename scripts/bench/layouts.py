"""Steps of a layer in one layout, timed on every rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_plugin.layer import MoELayer
from moe_plugin.output import LayerStats
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.routing import finish_step


def timed_step(layer: MoELayer, x_TD: Tensor, choice: LayoutChoice | None,
               grad_TD: Tensor | None = None) -> tuple[float, LayerStats]:
    """Run forward and backward, which all ranks start together; return seconds and the call's
    statistics.

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


def slowest(ranks: Sequence[Mapping[str, Mapping[str, Sequence[float]]]], name: str) -> list[float]:
    """Return each step's time on the slowest rank, from the `seconds` of every rank by name and
    step.
    """
    return [max(step) for step in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
