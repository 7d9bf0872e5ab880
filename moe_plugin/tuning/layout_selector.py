"""Selects the layout in which a call of a layer runs: as requested, as configured or as tuned."""

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
    """Common interface for fixed and tuned layouts.

    Args:
        config: settings of the layer.
        place: where the parameters of the layer are stored.
        experts: experts of the layer.
        host: information about the host framework.

    Attributes:
        prefill: divides evaluation calls according to their load. None if disabled.
        available: layouts that can be selected.
        fixed: the configured layout.
        fixed_slots: whether rows are placed in slots, including empty slots, which need a capacity.
        load_comm: ranks whose loads differ, and which must therefore agree on a capacity.
        tuner: tuner of `parallel: auto` or `predicted`. None if the layout is fixed.
        self_balanced: see `LayerStats`. The layer sets this attribute.
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
        """Return the layout of this call, the same on all ranks, and the agreed routing.

        Args:
            kept: routing of the call.
            choice: layout requested by the caller. Defaults to the tuned or configured layout.
                Under `torch.compile` the default is the configured layout, because tuning reads
                loads and times on the host.
            training: whether the layer is in training mode.
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
        """Start exchanging row counts with the layout that the next call is likely to use.

        See `Dispatcher.start_sizes`. A call that uses another layout exchanges the counts again.
        The result is None if nothing was started.
        """
        if self.prefill is not None and not training:
            return None
        return self.available.at(self.current).dispatcher.start_sizes(routing)

    def move_row_limit(self) -> None:
        """Move the row limit to the experts' device, after the experts were moved."""
        limit, anchor = self.available.limit, self.experts.anchor
        if limit is not None and anchor is not None:
            limit.to(anchor.device)

    @property
    def current(self) -> LayoutChoice:
        """Layout of the latest call without a requested layout, or else of the next call."""
        return self.available.fixed if self.tuner is None else self.tuner.current

    def stats(self, layout: LayerLayout, kept: KeptRouting, rows: int | Tensor,
              traffic: TrafficMeter | None) -> LayerStats:
        """Return the statistics of a call.

        Args:
            layout, kept: layout and routing of the call.
            rows: rows computed by this rank's experts, see `DispatchPlan`.
            traffic: counters of the data that this rank sent. None if there is only one rank.
        """
        routing, after, experts = kept.before, kept.routing, self.config.num_experts
        load_KE = known_load(routing)[0]
        if load_KE is None:
            load_KE = expert_load(routing.ids_TK, experts, per_choice=True)
        kept_KE, chosen_KE = load_KE, None
        if routing.undropped_TK is not None:  # the router itself dropped some choices
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
        """Finish an optimizer step. All ranks must call this."""
        if self.available.replicas is not None:
            self.available.replicas.finish_step()

    @contextmanager
    def with_fixed_layout(self) -> Iterator[None]:
        """Use the fixed layout inside the block, and no replicas placed by earlier steps.

        Results inside the block do not depend on earlier loads or measurements.
        """
        tuner, replicas = self.tuner, self.available.replicas
        self.tuner = None
        try:
            with nullcontext() if replicas is None else replicas.pause():
                yield
        finally:
            self.tuner = tuner

    def state(self) -> dict[str, Any]:
        """Return the position of the local experts, the state of a tuner, and replicas."""
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
        """Load a state. The state of the tuner is optional.

        Raises:
            ValueError: if the experts of the checkpoint are not the experts of this rank.
        """
        for key, mine in {"shards": None, **self.state()}.items():
            if key not in ("tuner", "replicas") and state.get(key) != mine:
                raise ValueError(
                    f"the checkpoint has {key}={state.get(key)}, but this layer has {key}={mine}. "
                    "Load it with the same number of experts, expert-parallel ranks and shards, or "
                    "reshard it with moe_plugin.checkpoint.reshard")
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
