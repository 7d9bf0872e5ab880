"""The part of a Mixture-of-Experts layer that runs after the router. It is used by `MoELayer`, and
by models that have their own router, such as models from transformers.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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
from moe_plugin.utils.selective import hidden_from_policies
from moe_plugin.utils.statistics import statistics

STATE_VERSION = 1

# settings that are read by the router or the capacity, which such a model does not use
_UNREAD = ("dispatch.capacity_factor", "dispatch.eval_capacity_factor",
           "dispatch.eval_token_fraction", "dispatch.equal_tokens", "parallel.replicas")


def check_routed(config: MoEConfig, ranks: int) -> None:
    """Check the settings of a model that has its own router.

    Args:
        config: the settings.
        ranks: the size of the expert-parallel group.
    Raises:
        ValueError: a setting would be ignored, or would change the model's result.
    """
    name = config.dispatch.name
    traits = dispatchers.get(name).traits
    for unfit, why in (
            (traits.shares_tokens, "assumes that all ranks have the same tokens"),
            (traits.fixed_slots, "needs a capacity and drops the tokens that exceed it"),
            (traits.bounded and ranks > 1, f"can run out of buffer space on one of {ranks} ranks, "
             "and nothing checks for this after a step of such a model")):
        if unfit:
            raise ValueError(f"dispatch.name={name!r} {why}, so it cannot be used in a model that "
                             "has its own router. Use dispatch.name='ragged'")
    given, default = flatten(to_dict(config)), flatten(to_dict(MoEConfig()))
    for path in _UNREAD:
        check(given[path] == default[path], path, given[path],
              f"{default[path]} in a model that has its own router", "leave it out")


@dataclass(frozen=True)
class RoutedCall:
    """Data about one call of a layer, which is passed to `Statistic.measure`.

    Attributes:
        layout: the layout of the call.
        kept: the routing of the call.
        rows: the number of rows that the experts of this rank computed.
        sent: counters of the data that this rank sent in the call.
        experts: the experts of this rank.
    """

    layout: LayerLayout
    kept: KeptRouting
    rows: int | Tensor
    sent: Counters
    experts: Experts


class RoutedExperts:
    """The computation of an MoE layer after routing: select a layout, send rows to their experts,
    compute the experts, and combine the results.

    `RoutedExperts` is not an `nn.Module`. The layer registers the experts as its own submodule
    `experts`, so that checkpoints, FSDP and DDP see the parameters under short and stable names.

    Args:
        config: the settings of the layer.
        placement: describes which ranks store each expert.
        experts: the experts of this rank, without any adapter that wraps them.
        host: information that the host framework provides about the layer.

    Attributes:
        layouts: all layouts that can be selected.
        prefill: divides the rows of evaluation calls into pieces. None without `parallel.prefill`.
        fixed: the layout from the settings.
        fixed_slots: whether the dispatcher sends a fixed number of slots, and therefore requires a
            capacity.
        load_comm: the group of ranks that process different tokens and must agree on a capacity.
        tuner: selects the layout if `parallel.mode` is `auto` or `predicted`, otherwise None.
        self_balanced: whether the router balances the load without a loss. Set by the layer.
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
        self._measured = list(filter(operator.attrgetter("measure"), statistics.values()))
        self._copies = placement.replicas.size if placement.replicas is not None else 1
        if traits.shares_tokens:
            # All ranks have the same tokens and the same loads. They need no agreement on a
            # capacity, and each of them reports the same statistics.
            self.load_comm, self._copies = LocalComm(), comm.size
        self.prefill = None
        if config.parallel.prefill and experts.anchor is not None:
            self.prefill = PrefillPieces(config, self.layouts, experts.anchor)

    @classmethod
    def of_model(cls, config: MoEConfig, comm: Comm,
                 experts: Callable[[MoEConfig, Placement], Experts], *,
                 dtype: torch.dtype | None = None,
                 agreed: Mapping[str, Any] = MappingProxyType({})) -> RoutedExperts:
        """Build the routed experts for a model that has its own router and stores its own experts.

        Collective over `comm`.

        Args:
            config: the settings. Only the sizes, `dispatch`, `parallel`, `comm`, `tuner` and
                `experts.compute` are used.
            comm: the expert-parallel group. The gradient of an expert is the sum over the tokens of
                all ranks in this group.
            experts: a function `experts(config, placement)` that returns the experts of this rank.
            dtype: the dtype of the parameters. Defaults to torch's default dtype.
            agreed: additional values, by name, that must be equal on all ranks (`HostContext`).
        Raises:
            ValueError: a setting is not allowed (`check_routed`), the settings do not fit the group
                or the experts, or the ranks have different settings.
        """
        check_routed(config, comm.size)
        # the meta device, because the model has already allocated the experts
        host = HostContext(agreed=agreed)
        config, place, _ = place_experts(config, comm, dtype=dtype, device="meta", host=host)
        return cls(config, place, experts(config, place), host)

    @hidden_from_policies
    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *,
                 training: bool = True) -> Tensor:
        """Compute the weighted sum of the outputs of each token's experts, for tokens that are
        already routed.

        Args:
            x_TD: the tokens of this rank, [T, D]. T may be zero, and may differ between ranks.
            ids_TK: int64 [T, K], the global indices of the experts. The index -1 means that no
                expert is chosen.
            weights_TK: floating-point tensor [T, K], the weight of each expert. The weight must be
                0 where the index is -1.
            training: whether the call is part of training. Layouts are tuned only in training
                calls.
        Returns: the outputs, [T, D], in the dtype of `x_TD`.
        Raises:
            ValueError: `ids_TK` contains the index of an expert that does not exist.
            CommError: a collective failed or timed out. The message contains the rank, the name of
                the collective and the sizes.
        """
        last = self.placement.experts - 1
        check_range(ids_TK, -1, last, f"ids_TK has experts {{}}..{{}}: must be in 0..{last}, or -1 "
                    "for no expert. Pass indices of this model's experts")
        wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        none = torch.zeros((), device=x_TD.device)
        routing = Routing(ids_TK, weights_TK.to(wide), None, {}, none, none.long())
        kept = KeptRouting(routing, None, None, routing)
        layout, kept = self.select(kept, None, training)
        if self.tuner is not None and not torch.compiler.is_compiling():
            self.tuner.pop_decisions()  # there are no statistics to carry them; this logs them
        return self.run(self.experts, layout, x_TD, kept)[0]

    def select(self, kept: KeptRouting, choice: LayoutChoice | None,
               training: bool) -> tuple[LayerLayout, KeptRouting]:
        """Select the layout of a call. All ranks select the same layout.

        Under `torch.compile`, the layout from the settings is used, because the tuner would have to
        read loads and times on the host.

        Args:
            kept: the routing after the capacity has been applied.
            choice: the layout that the caller requests. Defaults to the layout from the tuner or
                the settings.
            training: whether the call is part of training.
        Returns: the layout and the routing. If the ranks had to exchange row counts to select the
            layout, the returned routing contains these counts.
        """
        if transformed():
            self._check_transform()
        timer = None
        if self.tuner is None or choice is not None or torch.compiler.is_compiling():
            layout = self.fixed if choice is None else self.layouts.at(choice)
        elif self.tuner.settled:
            # saves a call of `Layouts.at` in most forward passes
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
        """Send rows to their experts, compute the experts, and combine the results.

        If the layout cannot be traced, `torch.compile` breaks the graph around this method.

        Args:
            experts: the experts of this rank, or an adapter that wraps them.
            layout: the layout returned by `select`.
            x_TD: the tokens of this rank, [T, D].
            kept: the routing returned by `select`.
            alongside: work that runs after the rows were sent and before the experts compute.
        Returns: the combined results of the tokens, [T, D], and the number of rows that this rank's
            experts computed.
        """
        if torch.compiler.is_compiling() and not layout.compiles:
            from moe_plugin.tuning.uncompiled import uncompiled  # loads the compiler

            y_TD, computed = uncompiled(RoutedExperts.run, self, experts, layout, x_TD, kept,
                                        alongside)
            return y_TD, computed
        dispatcher = layout.dispatcher
        plan = dispatcher.plan(kept)
        sent = layout.dispatch(x_TD, plan, experts)
        if alongside is not None:
            alongside()
        # `sent` yields a piece when it has arrived. Its results start to return in `put_back`,
        # while the next piece is computed.
        for rows in sent:
            sent.put_back(experts(rows))
        return dispatcher.combine(sent, plan), plan.rows

    def start_sizes(self, routing: Routing, training: bool) -> Any:
        """Start to exchange the row counts of the next call between ranks
        (`Dispatcher.start_sizes`).

        The exchange assumes that the next call uses the current layout; otherwise, the next call
        exchanges its row counts again. Returns None if no exchange was started.
        """
        if self.prefill is not None and not training:
            return None
        return self.layouts.at(self.current).dispatcher.start_sizes(routing)

    def move_row_limit(self) -> None:
        """Move the row limit to the device of the parameters, after the parameters were moved."""
        limit, anchor = self.layouts.limit, self.experts.anchor
        if limit is not None and anchor is not None:
            limit.to(anchor.device)

    @property
    def current(self) -> LayoutChoice:
        """The layout of the most recent call for which the caller did not request a layout.

        Before the first such call, this is the layout chosen for the first call.
        """
        return self.layouts.fixed if self.tuner is None else self.tuner.current

    def stats(self, layout: LayerLayout, kept: KeptRouting, rows: int | Tensor,
              traffic: TrafficMeter | None) -> LayerStats:
        """Return the statistics of a call.

        Args:
            layout: the layout of the call.
            kept: the routing of the call.
            rows: the number of rows that this rank's experts computed (`DispatchPlan`).
            traffic: counters of the data that this rank sends. None if the group has only one rank.
        """
        routing, after, experts = kept.before, kept.routing, self.config.num_experts
        # the router may have counted the load already
        load_KE = known_load(routing)[0]
        if load_KE is None:
            load_KE = expert_load(routing.ids_TK, experts, per_choice=True)
        kept_KE, chosen_KE = load_KE, None
        if routing.undropped_TK is not None:  # the router itself has dropped some choices
            load_KE = expert_load(routing.undropped_TK, experts, per_choice=True)
        if after is not routing:
            kept_KE = expert_load(after.ids_TK, experts, per_choice=True)
        if routing.chosen_TK is not None:
            chosen_KE = expert_load(routing.chosen_TK, experts, per_choice=True)
        comm, traced, tuner = self.placement.comm, torch.compiler.is_compiling(), self.tuner
        decisions: tuple[TunerDecision, ...] = ()
        if tuner is not None and not traced and (not tuner.settled or tuner.decisions):
            decisions = tuner.pop_decisions()
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
            self_balanced=self.self_balanced,
            more={} if not self._measured else self._more(
                RoutedCall(layout, kept, rows, sent, self.experts)))

    def _more(self, call: RoutedCall) -> dict[str, Any]:
        """Return the detached values of all statistics that define a `measure` function."""
        found = {s.name: s.measure(call) for s in self._measured if s.measure is not None}
        return {name: x.detach() if isinstance(x, Tensor) else x for name, x in found.items()}

    def finish_step(self) -> None:
        """Update the replicated experts after an optimizer step. Collective."""
        if self.layouts.replicas is not None:
            self.layouts.replicas.finish_step()

    @contextmanager
    def with_fixed_layout(self) -> Iterator[None]:
        """Inside the block, use the layout from the settings, and do not use replicas of experts.

        Results are then bitwise reproducible, because they do not depend on earlier measurements or
        loads.
        """
        tuner, replicas = self.tuner, self.layouts.replicas
        self.tuner = None  # `select` then uses the configured layout
        try:
            with nullcontext() if replicas is None else replicas.pause():
                yield
        finally:
            self.tuner = tuner

    def state(self) -> dict[str, Any]:
        """Return which experts this rank stores, the state of the tuner, and the state of the
        expert replicas."""
        place = self.placement
        optional: dict[str, Any] = {}
        if self.layouts.replicas is not None:
            optional["replicas"] = self.layouts.replicas.standing.state()
        if self.tuner is not None:
            optional["tuner"] = self.tuner.state()
        if place.configured_shards is not None:
            optional["shards"] = place.configured_shards
        return {"version": STATE_VERSION, "num_experts": place.experts, "ep_size": place.comm.size,
                "ep_rank": place.comm.rank, **optional}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state returned by `state`. The states of the tuner and of the expert replicas
        may be missing.

        Raises:
            ValueError: the checkpoint contains the experts of a different rank.
        """
        for key, own_value in {"shards": None, **self.state()}.items():
            if key not in ("tuner", "replicas") and state.get(key) != own_value:
                raise ValueError(
                    f"the checkpoint has {key}={state.get(key)}, but this layer has "
                    f"{key}={own_value}. Load the checkpoint with the same number of experts, "
                    "expert-parallel ranks and shards, or convert it with "
                    "moe_plugin.checkpoint.reshard")
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
        mode = self.config.parallel.mode
        probe: Any = self.experts.anchor  # None for experts without parameters
        if mode == "predicted":
            return PredictedLayout(self.config, self.layouts, probe)
        if mode == "auto":
            return LayoutTuner(self.config, self.layouts, probe)
        return None
