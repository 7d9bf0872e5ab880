"""Which experts tokens choose together, counted in training for `planner.expert_order`.

A hook on each layer's router adds one matrix product of [E, T] and [T, E] to a call, and keeps some
of its tokens' choices; nothing is copied to the host and nothing sent until the record is written.
Layers without `observe.choices` have no hook.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.layer import MoELayer
from moe_plugin.planner.expert_order import CoChoices
from moe_plugin.planner.order_files import dump_choices
from moe_plugin.records import Routing
from moe_plugin.regular_files import check_output
from moe_plugin.routing.contract import expert_groups_of
from moe_plugin.routing.replay import inside_backward, replaying

CALLS, TOKENS = 128, 64  # whose choices are kept: of so many calls, tokens of each


class ChoiceLog:
    """Counts the choices of layers, and writes those since the last record to a file.

    Args:
        path: the file, which rank 0 writes.
        layers: with a `MoELayer` each, by the names that records have.
        comm: ranks whose tokens belong together.
    Raises:
        ValueError: a file that cannot be written; a router whose experts have fixed places.
    """

    def __init__(self, path: str, layers: Mapping[str, nn.Module], comm: Comm) -> None:
        self.path, self.comm = path, comm
        if comm.rank == 0:
            check_output(path)
        self.layers = {name: _LayerChoices(name, _moe_layer(layer))
                       for name, layer in sorted(layers.items())}

    def write(self) -> None:
        """Write what was counted since the last time, if anything was. Collective."""
        sums = self.comm.all_reduce(torch.cat([each.taken() for each in self.layers.values()]))
        parts = sums.cpu().split([each.experts**2 + 1 for each in self.layers.values()])
        found = {name: each.record(part)
                 for (name, each), part in zip(self.layers.items(), parts, strict=True)}
        kept = {name: one for name, one in found.items() if one is not None}
        if kept and self.comm.rank == 0:
            dump_choices(self.path, kept)


def _moe_layer(layer: nn.Module) -> MoELayer:
    return next(part for part in layer.modules() if isinstance(part, MoELayer))


class _LayerChoices:
    """Choices of one layer since the last record.

    Attributes:
        counts: int64 [E * E + 1]: tokens by pair of experts, and all that chose any; None: no call.
        recent: of this rank, the last calls' choices, int64 [n, K]. device: where counts are added.
    """

    def __init__(self, name: str, layer: MoELayer) -> None:
        self.groups, self.experts = expert_groups_of(layer.router), layer.config.num_experts
        if not self.groups:
            raise ValueError(
                f"observe.choices with router {type(layer.router).__name__} of layer {name!r}: its "
                "choices depend on where experts are, or it does not say that they do not "
                "(expert_groups); must be none; leave it out, or use another router")
        self.counts: Tensor | None = None
        self.recent: deque[Tensor] = deque(maxlen=CALLS)
        self.device = layer.comm.device
        layer.router.register_forward_hook(self._add)

    def _add(self, router: nn.Module, args: Any, routing: Routing) -> None:
        if not router.training or torch.compiler.is_compiling() or inside_backward() or replaying():
            return
        ids_TK, experts = routing.ids_TK.detach(), self.experts
        chosen_TE = torch.zeros(ids_TK.shape[0], experts + 1, device=ids_TK.device)
        chosen_TE = chosen_TE.scatter_(1, ids_TK + 1, 1.0)[:, 1:]  # -1: none
        some = chosen_TE.amax(1).sum()
        pairs_EE = chosen_TE.T @ chosen_TE  # whole numbers, exact in float32 below 2^24 tokens
        counts = torch.cat([pairs_EE.flatten(), some[None]]).to(torch.int64)
        self.counts = counts if self.counts is None else self.counts + counts
        self.recent.append(ids_TK[::max(1, ids_TK.shape[0] // TOKENS)][:TOKENS].clone())

    def taken(self) -> Tensor:
        """The counts, which begin anew."""
        counts, self.counts = self.counts, None
        if counts is None:
            return torch.zeros(self.experts**2 + 1, dtype=torch.int64, device=self.device)
        return counts

    def record(self, counts: Tensor) -> CoChoices | None:
        """Of all ranks' counts, on the host, with this rank's recent choices."""
        recent, experts = [ids_TK.tolist() for ids_TK in self.recent], self.experts
        self.recent.clear()
        *pairs, tokens = counts.tolist()
        sets = [tuple(e for e in chosen if e >= 0) for call in recent for chosen in call]
        if not tokens:
            return None
        return CoChoices(tokens, [pairs[e * experts:(e + 1) * experts] for e in range(experts)],
                         [chosen for chosen in sets if chosen], self.groups)
