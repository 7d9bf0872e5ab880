"""Steps of a layer in one layout, timed on every rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from moe_plugin.layer import MoELayer
from moe_plugin.planner.choice import LayoutChoice


def one_step(layer: MoELayer, tokens: int, choice: LayoutChoice | None) -> tuple[float, str]:
    """A forward and backward pass on random tokens; all ranks begin together.

    Args:
        tokens: of this rank. choice: the layout; None: as configured or tuned.
    Returns: its seconds, and the layout that it ran in.
    """
    x_TD = torch.randn(tokens, layer.config.model_dim, requires_grad=True)
    layer.comm.barrier()
    start = time.perf_counter()
    out = layer(x_TD, choice=choice)
    out.output.square().mean().backward()
    return time.perf_counter() - start, out.stats.layout


def slowest(ranks: Sequence[Mapping[str, Mapping[str, Sequence[float]]]], name: str) -> list[float]:
    """Each step's time on the slowest rank, from `seconds` by name and step of every rank."""
    return [max(step) for step in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
