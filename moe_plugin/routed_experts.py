"""`RoutedExperts`: the path of tokens behind a router, of `MoELayer` and of models that route by
themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm import Comm, LocalComm
from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.comm.state import Counters, TrafficMeter
from moe_plugin.config import MoEConfig
from moe_plugin.config.options import check
from moe_plugin.config.tree import flatten, to_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.dispatch.layout import LayerLayout
from moe_plugin.dispatch.rows import known_load
from moe_plugin.experts import Experts, OverlappedWork
from moe_plugin.kernels.activations import not_transformed, refuse_vmap, transformed
from moe_plugin.kernels.choices import expert_load
from moe_plugin.output import LayerStats
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.records import KeptRouting, Routing
from moe_plugin.routing.call import check_range
from moe_plugin.tuning.decisions import TunerDecision
from moe_plugin.tuning.layout_tuner import LayoutTuner
from moe_plugin.tuning.layouts import Layouts
from moe_plugin.tuning.placement import place_experts
from moe_plugin.tuning.predicted import PredictedLayout, PrefillPieces
from moe_plugin.tuning.timer import Timed

STATE_VERSION = 1

# read by the parts of a layer that are not on this path
_UNREAD = ("dispatch.capacity_factor", "dispatch.eval_capacity_factor",
           "dispatch.eval_token_fraction", "dispatch.equal_tokens", "parallel.replicas")


def check_routed(config: MoEConfig, ranks: int) -> None:
    """`ValueError` for settings that `RoutedExperts` of so many ranks would ignore, or with which
    it would compute something else.
    """
    name = config.dispatch.name
    traits = dispatchers.get(name).traits
    for unfit, why in (
            (traits.shares_tokens, "takes the tokens of all ranks for the same"),
            (traits.fixed_slots, "needs a capacity, by which choices are dropped"),
            (traits.bounded and ranks > 1, f"may have more rows than fit on one of {ranks} ranks, "
             "which is not asked for here after a step")):
        if unfit:
            raise ValueError(f"dispatch.name={name!r} {why}: must be a dispatcher of exact rows "
                             "where each rank brings tokens and their experts; use 'ragged'")
    given, default = flatten(to_dict(config)), flatten(to_dict(MoEConfig()))
    for path in _UNREAD:
        check(given[path] == default[path], path, given[path],
              f"{default[path]} where experts come with the tokens", "leave it out")


class RoutedExperts:
    """Selects the layout of a call, and runs it: plan, dispatch, experts, combine.

    It is not a module: who has it registers `experts`, so that parameters keep their names.

    Args:
        config: the layer's.
        placement: where its parameters are stored.
        experts: that the layer was built with; adapters may stand in their place.
        host: what the host knows of the layer.

    Attributes:
        layouts: what may be selected.
        prefill: cuts the calls of evaluation by their load; None: nothing does.
        fixed: the configured layout.
        fixed_slots: whether slots are made, empty ones too, which need a capacity.
        load_comm: the ranks whose loads differ: those that must agree on a capacity.
        tuner: of `parallel: auto` or `predicted`; None: the layout is fixed.
        self_balanced: see `LayerStats`; the layer says so.
    """

    self_balanced = False

    def __init__(self, config: MoEConfig, placement: Placement, experts: Experts,
                 host: HostContext) -> None:
        self.config, self.placement, self.experts, self.host = config, placement, experts, host
        self.layouts = Layouts(config, placement, experts)
        self.fixed = self._latest = self.layouts.at(self.layouts.fixed)
        self.tuner = self._make_tuner(host)
        traits, comm = self.layouts.traits, placement.comm
        self.fixed_slots, self.load_comm = traits.fixed_slots, comm
        self._copies = placement.replicas.size if placement.replicas is not None else 1
        if traits.shares_tokens:
            self.load_comm, self._copies = LocalComm(), comm.size
        self.prefill = None
        if config.parallel.prefill and experts.anchor is not None:
            self.prefill = PrefillPieces(config, self.layouts, experts.anchor)

    @classmethod
    def of_model(cls, config: MoEConfig, comm: Comm,
                 experts: Callable[[MoEConfig, Placement], Experts], *,
                 dtype: torch.dtype | None = None,
                 agreed: Mapping[str, Any] = MappingProxyType({})) -> RoutedExperts:
        """For a model that routes by itself and has its experts. Collective.

        Args:
            config: sizes, `dispatch`, `parallel`, `comm`, `tuner` and `experts.compute` are read.
            comm: the expert-parallel group. An expert's gradient is the sum over the tokens of all
                its ranks, as of `MoELayer`.
            experts: `experts(config, placement)` makes what computes this rank's experts.
            dtype: of the parameters.
            agreed: see `HostContext`.
        Raises:
            ValueError: config, group and experts do not fit together, or differ between ranks; see
                `check_routed`.
        """
        check_routed(config, comm.size)
        # on the meta device, because the experts have their memory already
        host = HostContext(agreed=agreed)
        config, place, _ = place_experts(config, comm, dtype=dtype, device="meta", host=host)
        return cls(config, place, experts(config, place), host)

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *,
                 training: bool = True) -> Tensor:
        """Each token's experts, weighted and summed.

        Args:
            x_TD: [T, D] tokens of this rank; any number, also none.
            ids_TK: int64 [T, K], global indices of experts; -1: no expert.
            weights_TK: floating-point [T, K]; 0 where there is no expert.
            training: layouts are tuned, and evaluation's settings are not read.
        Returns: [T, D] in x's dtype.
        Raises:
            ValueError: ids_TK names an expert that does not exist; see `check_range`.
            CommError: a collective failed or timed out; it names rank, collective and sizes.
        """
        last = self.placement.experts - 1
        check_range(ids_TK, -1, last, f"ids_TK has experts {{}}..{{}}: must be in 0..{last}, or -1 "
                    "for no expert; give the numbers of this model's experts")
        wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        none = torch.zeros((), device=x_TD.device)
        routing = Routing(ids_TK, weights_TK.to(wide), None, {}, none, none.long())
        kept = KeptRouting(routing, None, None, routing)
        layout, kept = self.select(kept, None, training)
        if self.tuner is not None and not torch.compiler.is_compiling():
            self.tuner.pop_decisions()  # which logs them
        return self.run(self.experts, layout, x_TD, kept)[0]

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
            layout = self.fixed if choice is None else self.layouts.at(choice)
        elif self.tuner.settled:
            if self._latest.choice != self.tuner.current:
                self._latest = self.layouts.at(self.tuner.current)
            layout = self._latest
        else:
            layout, timer = self.tuner.layout(kept.routing, training)
        if (self.prefill is not None and choice is None and not training
                and not torch.compiler.is_compiling()):
            layout, kept = self.prefill.cut(layout, kept)
        if timer is not None:
            layout = dataclasses.replace(layout, dispatcher=Timed(layout.dispatcher, timer))
        return layout, kept

    def run(self, experts: nn.Module, layout: LayerLayout, x_TD: Tensor, kept: KeptRouting,
            alongside: OverlappedWork | None = None) -> tuple[Tensor, int | Tensor]:
        """Plan, dispatch, experts, combine; outside of a graph of `torch.compile` that cannot hold
        it.

        Args:
            experts: of the layer, or what stands in their place.
            layout, kept: of `select`.
            x_TD: [T, D] tokens of this rank.
            alongside: done while rows are on their way.
        Returns: (tokens' results [T, D], rows that this rank's experts computed).
        """
        if torch.compiler.is_compiling() and not layout.compiles:
            from moe_plugin.tuning.uncompiled import uncompiled  # it loads the compiler

            y_TD, computed = uncompiled(RoutedExperts.run, self, experts, layout, x_TD, kept,
                                        alongside)
            return y_TD, computed
        dispatcher = layout.dispatcher
        plan = dispatcher.plan(kept)
        sent = layout.dispatch(x_TD, plan, experts)
        if alongside is not None:
            alongside()
        for rows in sent:
            sent.put_back(experts(rows))
        return dispatcher.combine(sent, plan), plan.rows

    def start_sizes(self, routing: Routing, training: bool) -> Any:
        """See `Dispatcher.start_sizes`; of the layout that the next call probably has. One that
        then runs in another layout agrees again. None: nothing was begun.
        """
        if self.prefill is not None and not training:
            return None
        return self.layouts.at(self.current).dispatcher.start_sizes(routing)

    def move_row_limit(self) -> None:
        """After they moved to another device: what is none of them, but lies where they do."""
        limit, anchor = self.layouts.limit, self.experts.anchor
        if limit is not None and anchor is not None:
            limit.to(anchor.device)

    @property
    def current(self) -> LayoutChoice:
        """The layout of the latest call that was not given one, or of the next if there is none."""
        return self.layouts.fixed if self.tuner is None else self.tuner.current

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
        comm, traced, tuner = self.placement.comm, torch.compiler.is_compiling(), self.tuner
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
        if self.layouts.replicas is not None:
            self.layouts.replicas.finish_step()

    @contextmanager
    def with_fixed_layout(self) -> Iterator[None]:
        """The fixed layout inside, and no replicas that earlier steps placed: whatever ranks have
        seen and measured, the same bits.
        """
        tuner, replicas = self.tuner, self.layouts.replicas
        self.tuner = None
        try:
            with nullcontext() if replicas is None else replicas.pause():
                yield
        finally:
            self.tuner = tuner

    def state(self) -> dict[str, Any]:
        """Where the local experts come from; also what a tuner learned, and who has replicas."""
        place, more = self.placement, {}
        if self.layouts.replicas is not None:
            more["replicas"] = self.layouts.replicas.standing.state()
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
        if self.layouts.replicas is not None and state.get("replicas") is not None:
            self.layouts.replicas.standing.load_state(state["replicas"])

    def _check_transform(self) -> None:
        refuse_vmap()
        if self.placement.comm.size > 1 or not self.experts.traceable:
            raise not_transformed(
                f"{type(self.experts).__name__} of {self.placement.comm.size} ranks")

    def _make_tuner(self, host: HostContext) -> LayoutTuner | PredictedLayout | None:
        mode, probe = self.config.parallel.mode, self.experts.anchor
        if mode == "predicted":
            return PredictedLayout(self.config, self.layouts, probe)
        if mode == "auto":
            return LayoutTuner(self.config, self.layouts, probe)
        return None
