"""Every layout of one layer over its one storage: switching moves no parameter and changes no
number.

r = 0: all parameters are gathered, tokens stay. r >= 1: tokens go to r ranks each; see
`records.Placement` and docs/adaptive.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import LocalComm, algorithms
from moe_plugin.comm.base import Comm, Exchange
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import Dispatcher, PagedStash, dispatchers
from moe_plugin.dispatch.all_gather import AllGatherDispatcher
from moe_plugin.dispatch.local import LocalDispatcher
from moe_plugin.dispatch.rows_limit import RowsLimit
from moe_plugin.dispatch.spill import Planner, SpillingPlan
from moe_plugin.dispatch.stash import may_keep
from moe_plugin.dispatch.weights_first import WeighedChoices
from moe_plugin.dispatch.wire import with_wire
from moe_plugin.experts import Experts, FFNParameters, Strategy, strategies
from moe_plugin.experts.gathered import gather_parameters
from moe_plugin.experts.lent import LentExperts, joined
from moe_plugin.kernels.expert_ffn import KEEPS_ROWS
from moe_plugin.kernels.grad_sums import GradSums
from moe_plugin.machine import exporting
from moe_plugin.planner.choice import LayoutChoice, legal_r
from moe_plugin.planner.layer_cost import spill_costs
from moe_plugin.planner.spill import SpillPlan, plan_spill
from moe_plugin.records import (
    DispatchPlan,
    ExpertRows,
    KeptRouting,
    Overlap,
    Placement,
)
from moe_plugin.tuning.compute_tuner import takes_counts_of_device
from moe_plugin.tuning.default_hardware import default_cluster, default_device, layer_shape
from moe_plugin.tuning.standing import LayerReplicas
from moe_plugin.tuning.timer import CallTimer


@dataclass(frozen=True)
class Layout:
    """One choice, made ready.

    Attributes:
        choice: what it was made from.
        dispatcher: moves rows. strategy: computes them.
        gather: ranks whose parameters this one gathers before it computes; None: it has what it
            needs.
        gathered_shards: consecutive ranks of `gather` that hold shards of one expert.
        first_shard: the first shard that this rank has after gathering.
        stash: pages for what backward needs; None: autograd keeps it.
    """

    choice: LayoutChoice
    dispatcher: Dispatcher
    strategy: Strategy
    gather: Comm | None = None
    gathered_shards: int = 1
    first_shard: int = 0
    stash: PagedStash | None = None

    def parameters(self, experts: Experts) -> FFNParameters | None:
        """Gathered parameters to compute with; None: those that the experts store."""
        if self.gather is None:
            return None
        whole = gather_parameters(experts.local_parameters(), self.gather, self.gathered_shards)
        return experts.compute_parameters(whole, self.first_shard)


@dataclass(frozen=True)
class CallPlan:
    """What one call needs in one layout.

    Attributes:
        dispatch: of the dispatcher.
        weighed: where gate weights are multiplied with the experts' inputs; None: their outputs.
    """

    dispatch: DispatchPlan
    weighed: WeighedChoices | None = None

    @property
    def rows(self) -> int | Tensor:
        """Rows that this rank's experts compute, see `DispatchPlan`."""
        return self.dispatch.rows

    @property
    def spill(self) -> SpillPlan | None:
        """Which ranks compute other ranks' rows in this call; None: none does."""
        return self.dispatch.spill if isinstance(self.dispatch, SpillingPlan) else None


@dataclass(frozen=True)
class LayoutCall:
    """One call of a layer in one layout.

    Attributes:
        layout: see `Layout`. experts: of the layer.
        timer: times the call; None: its time is not wanted.
        weights_first: `experts.weights_first`.
    """

    layout: Layout
    experts: Experts
    timer: CallTimer | None = None
    weights_first: bool = False

    @property
    def runner(self) -> Callable[..., Any]:
        """What runs plan, dispatch, experts and combine: `runner(function, *args)`.

        Where `plan` reads rows by expert on the host, or experts are fetched, that is outside
        compiled graphs: every new load would be compiled again.

        Raises:
            ValueError: `torch.export` of experts that are fetched.
        """
        traits = self.layout.dispatcher.traits
        traced = self.experts.traceable and (traits.fixed_slots or traits.bounded)
        if torch.compiler.is_compiling() and not traced:
            if exporting():
                self._check_export()
                return _directly
            # imported here: it loads the compiler
            from moe_plugin.tuning.uncompiled import uncompiled

            return uncompiled
        return _directly

    def _check_export(self) -> None:
        if not self.experts.traceable:
            raise ValueError(
                f"{type(self.experts).__name__} are fetched by the host, which an exported program "
                "has none of: must be on the device; export with experts.store=device")

    def start(self, x_TD: Tensor) -> Tensor:
        """x_TD [T, D] itself, from where its time counts."""
        return x_TD if self.timer is None else self.timer.started(x_TD, self.experts.anchor)

    def plan(self, kept: KeptRouting) -> CallPlan:
        """Agree on all sizes; see `Dispatcher.plan`."""
        weighed = None
        if self.weights_first:
            kept, weighed = WeighedChoices.split(kept)
        return CallPlan(self.layout.dispatcher.plan(kept), weighed)

    def dispatch(self, x_TD: Tensor, plan: CallPlan,
                 meanwhile: Callable[[], None]) -> Iterator[ExpertRows]:
        """Work for this rank's experts, and those it borrows, piece by piece as it arrives.

        x_TD: [T, D] tokens of this rank. meanwhile: called when the rows are on their way.
        """
        layout, experts = self.layout, self.experts
        if plan.weighed is not None:
            x_TD = plan.weighed.inputs(x_TD)
        lent = None
        if plan.spill is not None:
            lent = LentExperts(experts, layout.dispatcher.placement, plan.spill)
        parameters = self._parameters()
        arriving = layout.dispatcher.dispatch(x_TD, plan.dispatch, experts.anchor)
        meanwhile()
        for work in arriving:
            work = ExpertRows(work.x, work.rows, parameters, layout.strategy)
            yield from (work,) if lent is None else lent.split(work)

    def _parameters(self) -> FFNParameters | None:
        """What all pieces compute with; where there are several, they share their gradients."""
        parameters, more = self.layout.parameters(self.experts), {}
        if self.layout.dispatcher.overlap.pieces > 1:
            more["sums"] = GradSums()
        if self.layout.stash is not None and may_keep():
            more["keep"] = self.layout.stash.keep
        if not more or not self.experts.supports_gather:
            return parameters
        return dataclasses.replace(parameters or self.experts.compute_parameters(), **more)

    def combine(self, outputs: Iterable[Tensor], plan: CallPlan) -> Tensor:
        """y_TD [T, D]: each token's rows weighted and summed. outputs: of the experts, in order."""
        if plan.spill is not None and plan.spill.guests(self.layout.dispatcher.placement.comm.rank):
            outputs = joined(outputs)
        y_TD = self.layout.dispatcher.combine(outputs, plan.dispatch, self.experts.anchor)
        if plan.weighed is not None:
            y_TD = plan.weighed.sum(y_TD)
        return y_TD if self.timer is None else self.timer.stopped(y_TD)


def _directly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Layouts:
    """The layouts of one layer, each made when it is first asked for.

    All ranks must ask for the same: making one may be collective.

    Args:
        config: the layer's. place: where its parameters are stored.
        experts: of the layer.

    Attributes:
        limit: of a dispatcher that bounds rows; None: of another. stash: see `Layout`.
        spills: whether other ranks than its owner may compute rows of an expert.
        replicas: of `parallel.spill: standing`; None: of another.
    """

    def __init__(self, config: MoEConfig, place: Placement, experts: Experts) -> None:
        self.config, self.place, self.experts = config, place, experts
        self.dispatcher = dispatchers.get(config.dispatch.name)
        self.traits = self.dispatcher.traits
        self.supports_gather = (experts.supports_gather and not self.traits.single_layout
                                and not self.traits.splits_slots)
        # every rank must have tokens of its own, and the rows that a rank computes must be whole
        self.gathers_tokens = (place.comm.size > 1 and place.replicas is None
                               and not self.traits.single_layout and not self.traits.bounded)
        device = None if experts.anchor is None else experts.anchor.device
        self.limit = RowsLimit(config, device) if self.traits.bounded else None
        self.stash = None
        if config.dispatch.stash_mib and place.comm.size > 1:
            self.stash = place.comm.state.get(PagedStash)
            self.stash.ask(self, config.dispatch)
        self.spills = place.comm.size > 1 and self.supports_gather and self.traits.spills
        self.replicas: LayerReplicas | None = None
        self._made: dict[LayoutChoice, Layout] = {}
        self.fixed = self.from_config()
        self.at(self.fixed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy asks for pages, too."""
        vars(self).update(state)
        if self.stash is not None:
            self.stash.ask(self, self.config.dispatch)

    def from_config(self) -> LayoutChoice:
        """The choice that the settings name."""
        parallel, place = self.config.parallel, self.place
        r = parallel.r
        if r is None:
            r = place.shards if place.comm.size > 1 else 1
        return LayoutChoice(r=r, d=parallel.d, d_backward=parallel.d_backward,
                            algorithm=self.config.comm.all_to_all,
                            kernel=self.config.experts.compute, cut=parallel.cut,
                            spill=(parallel.spill or "never") if place.comm.size > 1 else "never")

    def legal(self) -> list[int]:
        """Values of r that this layer can run in."""
        place = self.place
        if not self.supports_gather:
            return [place.shards]
        legal = legal_r(place.experts, place.comm.size, place.shards)
        # gathered parameters compute this rank's own rows, of which none are bounded
        return legal if self.stash is None else [r for r in legal if r]

    def at(self, choice: LayoutChoice) -> Layout:
        """The layout of a choice. `ValueError`: it does not fit this layer; it names what does."""
        if choice not in self._made:
            self._made[choice] = self._make(choice)
        return self._made[choice]

    def _make(self, choice: LayoutChoice) -> Layout:
        self._check(choice)
        place = dataclasses.replace(self.place, algorithm=self._algorithm(choice.algorithm))
        strategy = strategies.get(choice.kernel)
        if place.comm.size == 1 or choice.r == 0:
            alone = Placement(LocalComm(), place.experts, place.algorithm)
            gather = place.comm if place.comm.size > 1 else None
            dispatcher = LocalDispatcher(alone, self.traits, self.experts.supports_gather
                                         and takes_counts_of_device(choice.kernel))
            return Layout(choice, dispatcher, strategy, gather, place.shards)
        if self.traits.single_layout:
            return Layout(choice, self.dispatcher(place), strategy)
        if choice.gather_tokens:
            return Layout(choice, AllGatherDispatcher(place), strategy)
        place = dataclasses.replace(place, copies=choice.r)
        overlap = Overlap(choice.d, choice.d_backward, self.config.experts.shared_overlap,
                          choice.cut)
        if choice.spill != "never":
            return Layout(choice, self.dispatcher(place, overlap, self._planner(choice.spill)),
                          strategy)
        limits = () if self.limit is None else (self.limit,)
        dispatcher = self.dispatcher(place, overlap, *limits)
        size = place.token_shards
        gather = place.comm.contiguous_subgroup(size) if size > 1 else None
        return Layout(choice, dispatcher, strategy, gather, size, place.shard // size * size,
                      self.stash)

    def _check_stash(self, choice: LayoutChoice) -> None:
        dropout = self.config.experts.dropout
        for what, instead, ok in (
                ("custom experts", "experts of a registered kind", self.experts.supports_gather),
                (f"experts.compute={choice.kernel!r}", f"one of {', '.join(KEEPS_ROWS)}",
                 choice.kernel in KEEPS_ROWS),
                (f"experts.dropout={dropout}", "0", not dropout),
                ("parallel.r=0", self.place.shards, choice.r != 0)):
            if not ok:
                raise ValueError(
                    f"dispatch.stash_mib={self.config.dispatch.stash_mib} does not fit {what}, "
                    f"whose rows do not go to pages: use {instead}, or dispatch.stash_mib=0")

    def _check(self, choice: LayoutChoice) -> None:
        place, size, legal = self.place, self.place.comm.size, self.legal()
        if self.stash is not None:
            self._check_stash(choice)
        if choice.r not in legal and not (size == 1 and choice.r == 0):
            raise ValueError(
                f"parallel.r={choice.r} does not fit {place.experts} experts on {size} "
                f"expert-parallel ranks: must be one of {legal}; the nearest is "
                f"{min(legal, key=lambda r: abs(r - choice.r))}")
        if choice.gather_tokens and (not self.gathers_tokens or choice.r != place.shards):
            raise ValueError(
                f"gather_tokens with r={choice.r} does not fit {size} expert-parallel ranks, "
                f"dispatch.name={self.config.dispatch.name!r} and parallel.replicas="
                f"{self.config.parallel.replicas}: must be False, or r={place.shards} with 'ragged'"
                " or 'padded' and one replica")
        if not self.traits.cuts and (choice.d > 1 or choice.backward_d > 1):
            raise ValueError(
                f"parallel.d={choice.d}, d_backward={choice.d_backward} does not fit "
                f"dispatch.name={self.config.dispatch.name!r}, which cannot split its rows into "
                "pieces; use 1 and 0, or 'ragged' or 'padded'")
        if choice.cut not in self.traits.cuts_by:
            raise ValueError(
                f"parallel.cut={choice.cut!r} does not fit dispatch.name="
                f"{self.config.dispatch.name!r}: must be one of {list(self.traits.cuts_by)}, or use"
                " dispatch.name='ragged'")
        self._check_spill(choice)

    def _check_spill(self, choice: LayoutChoice) -> None:
        if choice.spill == "never":
            return
        place = self.place
        bad = [f"{name}={value!r}: use {instead}" for name, value, instead, ok in (
            ("dispatch.name", self.config.dispatch.name, "'ragged'", self.traits.spills),
            ("custom experts", True, "experts of a registered kind", self.experts.supports_gather),
            ("parallel.r", choice.r, place.shards, choice.r == place.shards),
            ("gather_tokens", choice.gather_tokens, False, not choice.gather_tokens)) if not ok]
        if bad or not self.spills:
            why = bad[0] if bad else f"{place.comm.size} expert-parallel rank: use more"
            raise ValueError(
                f"parallel.spill={choice.spill!r} does not fit {why}, or parallel.spill='never'")

    def _planner(self, policy: str) -> Planner:
        """Plans from the loads of a call, or of earlier steps; predicted times depend on nothing
        else.
        """
        comm, probe = self.place.comm, self.experts.anchor
        shape = layer_shape(self.config, self.place, probe, tokens=1)
        costs = spill_costs(shape, default_cluster(comm, probe.device),
                            default_device(self.config, probe.device))
        parallel = self.config.parallel
        if policy == "standing":
            if self.replicas is None:
                self.replicas = LayerReplicas(parallel, comm, self.experts, costs)
            return self.replicas
        return partial(plan_spill, costs=costs, policy=policy, guests=parallel.guests,
                       speeds=parallel.rank_speeds(self.place.comm.size))

    def _algorithm(self, name: str) -> Exchange:
        comm = self.config.comm
        if name == comm.all_to_all:
            return self.place.algorithm
        return with_wire(algorithms.get(name), comm.wire)
