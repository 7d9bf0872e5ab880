"""Expert shadowing (FasterMoE) at run time: hot experts' weights on every rank for one call, their
gradients back at the owner.

Any set of shadows gives the same outputs and gradients, so the set may be a few calls old: it is
agreed every `EVERY` calls.
"""

from __future__ import annotations

import dataclasses

import torch

from moe_plugin.dispatch.rows import exact_rows
from moe_plugin.kernels import expert_load
from moe_plugin.planner.shadow import ShadowModel, choose_shadows
from moe_plugin.records import Placement, Routing, RowPlan
from moe_plugin.routing.replay import Replaying, ReplayLog

EVERY = 8


class Shadows(Replaying):
    """The shadow set of one layer. All ranks alike.

    Args:
        most: experts shadowed at most at a time. model: what a shadow costs and saves.
        replay: see `HostContext`.
    """

    def __init__(self, place: Placement, most: int, model: ShadowModel, replay: bool) -> None:
        self.place, self.most, self.model = place, most, model
        self.current: tuple[int, ...] = ()
        self.calls = 0
        self.recordings = ReplayLog(replay)

    def select(self, routing: Routing, training: bool) -> tuple[int, ...]:
        """The shadow set of this call. In training it looks at the load now and then; a
        recomputation repeats its first pass.
        """
        if not training:
            return self.current
        return self.recordings.replayed(lambda: self._update(routing), training)

    def forget_recordings(self) -> None:
        """See `moe_plugin.routing.replay.forget`."""
        self.recordings.forget()

    def _update(self, routing: Routing) -> tuple[int, ...]:
        """One small all-gather every `EVERY` calls, the same decision on all ranks."""
        self.calls += 1
        if self.calls % EVERY != 1:
            return self.current
        experts = self.place.experts
        load_E = expert_load(routing.ids_TK, experts)
        counts_WE = self.place.comm.all_gather(load_E).view(-1, experts).tolist()
        self.current = tuple(sorted(choose_shadows(counts_WE, self.model, self.most)))
        return self.current


def split_routing(routing: Routing, experts: tuple[int, ...]) -> tuple[Routing, RowPlan]:
    """(what is still sent to others, rows that stay here for the shadowed experts)."""
    ids_TK = routing.ids_TK
    index_E = torch.full((max(experts) + 1,), -1, dtype=torch.int64, device=ids_TK.device)
    index_E[list(experts)] = torch.arange(len(experts), device=ids_TK.device)
    local_TK = index_E[ids_TK.clamp(min=0, max=max(experts))].masked_fill(
        (ids_TK < 0) | (ids_TK > max(experts)), -1)
    sent = dataclasses.replace(routing, ids_TK=ids_TK.masked_fill(local_TK >= 0, -1))
    return sent, exact_rows(local_TK, routing.weights_TK, len(experts))
