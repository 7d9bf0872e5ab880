"""Which layout a call of a layer runs in: as given, as configured or as tuned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import LocalComm
from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.comm.state import Counters, TrafficMeter
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch.rows import known_load
from moe_plugin.experts import Experts
from moe_plugin.kernels.activations import not_transformed, refuse_vmap, transformed
from moe_plugin.kernels.choices import expert_load
from moe_plugin.output import LayerStats
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.records import KeptRouting, Routing
from moe_plugin.tuning.decisions import TunerDecision
from moe_plugin.tuning.layout_tuner import LayoutTuner
from moe_plugin.tuning.layouts import LayerLayout, Layouts
from moe_plugin.tuning.predicted import PredictedLayout, PrefillPieces

STATE_VERSION = 1


class LayoutSelector:
    """One interface for layouts that are fixed or tuned.

    Args:
        config: the layer's.
        place: where its parameters are stored.
        experts: of the layer.
        host: what the host knows of the layer.

    Attributes:
        prefill: cuts the calls of evaluation by their load; None: nothing does.
        available: what may be selected.
        fixed: the configured layout.
        fixed_slots: whether slots are made, empty ones too, which need a capacity.
        load_comm: the ranks whose loads differ: those that must agree on a capacity.
        tuner: of `parallel: auto` or `predicted`; None: the layout is fixed.
        self_balanced: see `LayerStats`; the layer says so.
    """

    self_balanced = False

    def __init__(self, config: MoEConfig, place: Placement, experts: Experts,
                 host: HostContext) -> None:
        self.config, self.place, self.experts, self.host = config, place, experts, host
        self.available = Layouts(config, place, experts)
        self.fixed = self.available.at(self.available.fixed)
        self.tuner = self._make_tuner(host)
        traits = self.available.traits
        self.fixed_slots, self.load_comm = traits.fixed_slots, place.comm
        self._copies = place.replicas.size if place.replicas is not None else 1
        if traits.shares_tokens:
            self.load_comm, self._copies = LocalComm(), place.comm.size
        self.prefill = None
        if config.parallel.prefill and experts.anchor is not None:
            self.prefill = PrefillPieces(config, self.available, experts.anchor)

    def select(self, kept: KeptRouting, choice: LayoutChoice | None,
               training: bool) -> tuple[LayerLayout, KeptRouting]:
        """The layout of this call, the same on all ranks; the routing, with what ranks agreed on.

        choice: asked for by the caller; None: as tuned or configured; under `torch.compile` as
        configured, because a choice reads loads and times on the host.
        """
        if transformed():
            self._check_transform()
        timer = None
        if self.tuner is None or choice is not None or torch.compiler.is_compiling():
            layout = self.fixed if choice is None else self.available.at(choice)
        elif self.tuner.settled:
            layout = self.available.at(self.tuner.current)
        else:
            layout, timer = self.tuner.layout(kept.routing, training)
        if (self.prefill is not None and choice is None and not training
                and not torch.compiler.is_compiling()):
            layout, kept = self.prefill.cut(layout, kept)
        return (layout if timer is None else layout.timed(timer)), kept

    def _check_transform(self) -> None:
        refuse_vmap()
        if self.place.comm.size > 1 or not self.experts.traceable:
            raise not_transformed(
                f"{type(self.experts).__name__} of {self.place.comm.size} ranks")

    def start_sizes(self, routing: Routing, training: bool) -> Any:
        """See `Dispatcher.start_sizes`; of the layout that the next call probably has. One that
        then runs in another layout agrees again. None: nothing was begun.
        """
        if self.prefill is not None and not training:
            return None
        return self.available.at(self.current).dispatcher.start_sizes(routing)

    def move_row_limit(self) -> None:
        """After they moved to another device: what is none of them, but lies where they do."""
        limit, anchor = self.available.limit, self.experts.anchor
        if limit is not None and anchor is not None:
            limit.to(anchor.device)

    @property
    def current(self) -> LayoutChoice:
        """The layout of the latest call that was not given one, or of the next if there is none."""
        return self.available.fixed if self.tuner is None else self.tuner.current

    def stats(self, layout: LayerLayout, kept: KeptRouting, rows: int | Tensor,
              traffic: TrafficMeter | None) -> LayerStats:
        """What happened in a call.

        Args:
            layout, kept: of the call.
            rows: see `DispatchPlan`.
            traffic: what this rank sent; None: it is alone.
        """
        routing, after, experts = kept.before, kept.routing, self.config.num_experts
        load_KE = known_load(routing)[0]
        if load_KE is None:
            load_KE = expert_load(routing.ids_TK, experts, per_choice=True)
        kept_KE, chosen_KE = load_KE, None
        if routing.undropped_TK is not None:  # the router dropped some of them itself
            load_KE = expert_load(routing.undropped_TK, experts, per_choice=True)
        if after is not routing:
            kept_KE = expert_load(after.ids_TK, experts, per_choice=True)
        if routing.chosen_TK is not None:
            chosen_KE = expert_load(routing.chosen_TK, experts, per_choice=True)
        comm, traced, tuner = self.place.comm, torch.compiler.is_compiling(), self.tuner
        silent = tuner is None or traced or (tuner.settled and not tuner.decisions)
        decisions = () if silent else tuner.pop_decisions()
        sent = Counters() if traffic is None else traffic.sent()
        return LayerStats(
            load_KE, kept_KE, routing.entropy, routing.tokens,
            {name: loss.detach() for name, loss in routing.losses.items()},
            bytes_sent=sent.bytes, exchanges=sent.exchanges, rows=rows, rows_sent=sent.rows,
            rows_between=sent.rows_between,
            capacity=routing.capacity if kept.capacity is None else kept.capacity,
            layout=layout.label, decisions=tuple(map(TunerDecision.as_dict, decisions)),
            copies=self._copies, router=routing.router, chosen_KE=chosen_KE,
            store=self.experts.taken_counts() if self.experts.stored else {},
            collectives=None if comm.size == 1 or traced else comm.collectives.active(comm),
            self_balanced=self.self_balanced)

    def finish_step(self) -> None:
        """After an optimizer step, on all ranks."""
        if self.available.replicas is not None:
            self.available.replicas.finish_step()

    @contextmanager
    def with_fixed_layout(self) -> Iterator[None]:
        """The fixed layout inside, and no replicas that earlier steps placed: whatever ranks have
        seen and measured, the same bits.
        """
        tuner, replicas = self.tuner, self.available.replicas
        self.tuner = None
        try:
            with nullcontext() if replicas is None else replicas.pause():
                yield
        finally:
            self.tuner = tuner

    def state(self) -> dict[str, Any]:
        """Where the local experts come from; also what a tuner learned, and who has replicas."""
        place, more = self.place, {}
        if self.available.replicas is not None:
            more["replicas"] = self.available.replicas.standing.state()
        if self.tuner is not None:
            more["tuner"] = self.tuner.state()
        if place.configured_shards is not None:
            more["shards"] = place.configured_shards
        return {"version": STATE_VERSION, "num_experts": place.experts, "ep_size": place.comm.size,
                "ep_rank": place.comm.rank, **more}

    def load_state(self, state: dict[str, Any]) -> None:
        """`ValueError` if a checkpoint's experts are not this rank's. Tuner state is optional."""
        for key, mine in {"shards": None, **self.state()}.items():
            if key not in ("tuner", "replicas") and state.get(key) != mine:
                raise ValueError(
                    f"checkpoint has {key}={state.get(key)}, this layer has {key}={mine}; load it "
                    "with the same number of experts, expert-parallel ranks and shards, or reshard "
                    "it with moe_plugin.checkpoint.reshard")
        if self.tuner is not None and state.get("tuner") is not None:
            self.tuner.load_state(state["tuner"])
        if self.available.replicas is not None and state.get("replicas") is not None:
            self.available.replicas.standing.load_state(state["replicas"])

    def _make_tuner(self, host: HostContext) -> LayoutTuner | PredictedLayout | None:
        mode, probe = self.config.parallel.mode, self.experts.anchor
        if mode == "predicted":
            return PredictedLayout(self.config, self.available, probe)
        if mode == "auto":
            return LayoutTuner(self.config, self.available, probe)
        return None
