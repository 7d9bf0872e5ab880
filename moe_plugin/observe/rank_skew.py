"""How uneven the load of ranks is: the rows of the busiest one over the mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.layer import MoELayer, layers_in
from moe_plugin.output import MoEOutput
from moe_plugin.routing.replay import counts


class RankSkew:
    """Listens to MoE layers for some steps: what their ranks would have where each expert's rows go
    to its ranks (r >= 1), in any layout.

    Args:
        models: this rank's parts of a model.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.layers = layers_in(*models)
        self.loads: list[list[Tensor]] = [[] for _ in self.layers]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Calls inside count."""
        with ExitStack() as hooks:
            for layer, loads in zip(self.layers, self.loads, strict=True):
                hooks.callback(layer.register_forward_hook(partial(_take, loads)).remove)
            yield

    def mean(self) -> float:
        """Over calls and layers of this rank; 0: none was heard. Collective in each layer's group.
        """
        found = [skew_of(torch.stack(loads), layer) for layer, loads in zip(
            self.layers, self.loads, strict=True) if loads]
        return sum(found) / len(found) if found else 0.0


def _take(loads: list[Tensor], layer: nn.Module, _: Any, out: MoEOutput) -> None:
    if out.stats is not None and counts(layer.training):
        loads.append(out.stats.kept_KE.sum(0))


def skew_of(load_NE: Tensor, layer: MoELayer) -> float:
    """Mean over N calls. load_NE: int64 [N, E], this rank's tokens by expert."""
    place = layer.placement
    if place.comm.size > 1:
        load_NE = place.comm.all_reduce(load_NE)
    # ranks that share an expert have equal parts of its rows
    rows_NG = load_NE.double().view(len(load_NE), -1, place.local).sum(2)
    return float((rows_NG.amax(1) / rows_NG.mean(1).clamp(min=1e-9)).clamp(min=1.0).mean())
