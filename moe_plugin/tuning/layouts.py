"""All layouts of one layer over its storage.

Changing the layout moves no parameters and changes no results. With r = 0 all parameters are
gathered and tokens stay on their rank. With r >= 1 each token is sent to r ranks. See
`records.Placement` and docs/adaptive.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm import LocalComm, algorithms
from moe_plugin.comm.base import Comm
from moe_plugin.comm.exchange import Exchange
from moe_plugin.comm.placement import Placement
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import DispatchContext, Dispatcher, PagedStash, Sent, dispatchers
from moe_plugin.dispatch.all_gather import AllGatherDispatcher
from moe_plugin.dispatch.base import SpillPlanner
from moe_plugin.dispatch.bounded_once import BoundedOnceDispatcher, BoundedOnceToNodesDispatcher
from moe_plugin.dispatch.once import OnceDispatcher
from moe_plugin.dispatch.once_nodes import OnceToNodesDispatcher
from moe_plugin.dispatch.row_pages import may_keep
from moe_plugin.dispatch.rows import LocalDispatcher
from moe_plugin.dispatch.rows_limit import RowsLimit
from moe_plugin.dispatch.weights_first import WeightsFirst
from moe_plugin.dispatch.wire import with_wire
from moe_plugin.experts import Experts, FFNParameters, OverlappedWork, Strategy, strategies
from moe_plugin.experts.ffn import gather_parameters
from moe_plugin.kernels.expert_ffn import KEEPS_ROWS
from moe_plugin.kernels.weight_grads import GradSums
from moe_plugin.planner.choice import LayoutChoice, legal_r
from moe_plugin.planner.layer_cost import spill_costs
from moe_plugin.planner.spill import plan_spill
from moe_plugin.records import DispatchPlan, ExpertRows, KeptRouting, Overlap
from moe_plugin.tuning.borrowed import BorrowingDispatcher
from moe_plugin.tuning.compute_tuner import takes_counts_of_device
from moe_plugin.tuning.default_hardware import default_cluster, default_device, layer_shape
from moe_plugin.tuning.standing import LayerReplicas
from moe_plugin.tuning.timer import CallTimer, Timed
from moe_plugin.utils.machine import exporting


@dataclass(frozen=True)
class LayerLayout:
    """A layout that is ready for calls of a layer.

    Attributes:
        choice: choice that defines the layout.
        dispatcher: dispatcher that moves rows.
        experts: experts of the layer.
        strategy: strategy that computes rows. None means as the experts are configured.
        gather: ranks whose parameters this rank gathers before computing. None if not needed.
        gathered_shards: number of consecutive ranks of `gather` that store shards of one expert.
        first_shard: first shard that this rank has after gathering.
        stash: pages for tensors that backward needs. None means that autograd stores them.
        label: label of the choice, see `LayoutChoice`.
        pieces: number of pieces in which rows are sent and computed.
        plain: whether the configured experts compute all arriving rows with stored parameters.
    """

    choice: LayoutChoice
    dispatcher: Dispatcher
    experts: Experts
    strategy: Strategy | None = None
    gather: Comm | None = None
    gathered_shards: int = 1
    first_shard: int = 0
    stash: PagedStash | None = None
    label: str = dataclasses.field(init=False)
    pieces: int = dataclasses.field(init=False)
    plain: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.choice.label)  # part of every call's statistics
        object.__setattr__(self, "pieces", self.dispatcher.overlap.pieces)
        object.__setattr__(self, "plain", self.strategy is self.gather is self.stash is None
                           and self.pieces == 1)

    @property
    def compiles(self) -> bool:
        """Whether `torch.compile` may trace plan, dispatch, experts and combine.

        If `plan` reads row counts on the host, or experts are fetched, every new load would be
        compiled again. `torch.export` produces one program for any load.

        Raises:
            ValueError: if experts that are fetched are exported with `torch.export`.
        """
        if exporting():
            self._check_export()
            return True
        traits = self.dispatcher.traits
        # (expert, weight) pairs are sent by exchanges that a graph cannot contain
        return (self.experts.traceable and self.choice.send == "rows"
                and (traits.fixed_slots or traits.bounded))

    def _check_export(self) -> None:
        if not self.experts.traceable:
            raise ValueError(
                f"{type(self.experts).__name__} are fetched by the host, but an exported program "
                "has no host. Store them on the device: export with experts.store=device")
        if self.choice.send != "rows":
            raise ValueError(f"dispatch.send={self.choice.send!r} cannot be exported: torch.export "
                             "traces no exchange of pairs. Export with dispatch.send='rows'")

    def timed(self, timer: CallTimer) -> LayerLayout:
        """Return this layout for a call that `timer` measures."""
        return dataclasses.replace(self, dispatcher=Timed(self.dispatcher, timer))

    def dispatch(self, x_TD: Tensor, plan: DispatchPlan, experts: nn.Module,
                 anchored: bool = True) -> Sent:
        """Send the rows of tokens [T, D] to their experts. See `Dispatcher.dispatch`.

        Args:
            experts: experts of the layer, or a module that replaces them.
            anchored: whether gradients need an anchor. No anchor is needed if the tokens of all
                ranks, or of no rank, have gradients.
        """
        anchor = None
        if experts is not self.experts:
            anchor = self._anchor_of(experts)
        elif anchored and self.dispatcher.reads_anchor:
            anchor = self.experts.anchor
        if self.plain and self.experts.later is None:
            return self.dispatcher.dispatch(x_TD, plan, anchor)
        # parameters must be gathered before rows are sent
        parameters, strategy = self._parameters(experts), self.strategy
        sent = self.dispatcher.dispatch(x_TD, plan, anchor)
        arriving = sent.arriving
        sent.arriving = map(partial(_computed_with, parameters, strategy), arriving)
        return sent

    def _anchor_of(self, experts: nn.Module) -> Tensor | None:
        """Return a trained parameter, preferably one of the adapter in the experts' place.

        Raises:
            ValueError: if the adapter does not reach all ranks that compute the experts.
        """
        if self.experts.stored or self.choice.spill != "never":
            obstacle = ("experts outside the device" if self.experts.stored else
                        f"parallel.spill={self.choice.spill!r}")
            raise ValueError(
                f"{type(experts).__name__} cannot stand in for the experts of a layer together "
                f"with {obstacle}, because others compute with the stored parameters. Merge the "
                "adapter first, or use experts on the device and parallel.spill='never'")
        return next((p for p in experts.parameters() if p.requires_grad), self.experts.anchor)

    def _parameters(self, experts: nn.Module) -> FFNParameters | None:
        """Return the parameters shared by all pieces, or None to use the stored parameters."""
        parameters, more = None, {}
        if self.gather is not None:
            whole = gather_parameters(self._local(experts), self.gather, self.gathered_shards)
            parameters = self.experts.compute_parameters(whole, self.first_shard)
        # Exchanges of other pieces, or of another micro-batch for which delayed weight gradients
        # wait, run next to these matmuls. Kernels must leave processors for the exchanges.
        if self.pieces > 1 or (self.experts.later is not None and experts is self.experts):
            more["sums"] = GradSums()
        if self.stash is not None and may_keep():
            more["keep"] = self.stash.keep
        if not more or not self.experts.supports_gather:
            return parameters
        if parameters is None:
            local = None if experts is self.experts else self._local(experts)
            parameters = self.experts.compute_parameters(local)
        return dataclasses.replace(parameters, **more)

    def _local(self, experts: nn.Module) -> dict[str, Tensor]:
        """Return the experts' parameters. An adapter modifies the parameters in its call."""
        return self.experts.local_parameters() if experts is self.experts else experts(None)


def _computed_with(parameters: FFNParameters | None, strategy: Strategy | None,
                   work: ExpertRows) -> ExpertRows:
    """Return the same rows with parameters. Borrowed experts already have parameters."""
    weights = parameters if work.parameters is None else work.parameters
    return ExpertRows(work.x, work.rows, weights, strategy, work.started)


def through_experts(experts: nn.Module, layout: LayerLayout, x_TD: Tensor, kept: KeptRouting,
                    alongside: OverlappedWork | None = None) -> tuple[Tensor, int | Tensor]:
    """Run plan, dispatch, experts and combine, outside of compiled graphs if the layout needs it.

    Args:
        experts: experts of the layer, or a module that replaces them.
        alongside: work to do while rows are being sent.
    Returns: results of the tokens [T, D], and the number of rows that this rank computed.
    """
    if torch.compiler.is_compiling() and not layout.compiles:
        from moe_plugin.tuning.uncompiled import uncompiled  # this import loads the compiler

        y_TD, computed = uncompiled(through_experts, experts, layout, x_TD, kept, alongside)
        return y_TD, computed
    dispatcher = layout.dispatcher
    plan = dispatcher.plan(kept)
    sent = layout.dispatch(x_TD, plan, experts)
    if alongside is not None:
        alongside()
    for rows in sent:
        sent.put_back(experts(rows))
    return dispatcher.combine(sent, plan), plan.rows


class Layouts:
    """The layouts of one layer. Each layout is created when it is first requested.

    All ranks must request the same layouts, because creating a layout may be collective.

    Args:
        config: settings of the layer.
        place: where the parameters of the layer are stored.
        experts: experts of the layer.

    Attributes:
        limit: row limit of a dispatcher that bounds rows, otherwise None.
        stash: pages for tensors that backward needs, see `LayerLayout`.
        spills: whether ranks other than the owner may compute rows of an expert.
        replicas: replicas of `parallel.spill: standing`, otherwise None.
    """

    def __init__(self, config: MoEConfig, place: Placement, experts: Experts) -> None:
        self.config, self.place, self.experts = config, place, experts
        self.dispatcher = dispatchers.get(config.dispatch.name)
        self.traits = self.dispatcher.traits
        self.supports_gather = (experts.supports_gather and not self.traits.single_layout
                                and not self.traits.splits_slots)
        # gathering needs different tokens on all ranks, and a dispatcher without a bound on rows
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
        self._made: dict[LayoutChoice, LayerLayout] = {}
        self.fixed = self.from_config()
        self.at(self.fixed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which must request pages as well."""
        vars(self).update(state)
        if self.stash is not None:
            self.stash.ask(self, self.config.dispatch)

    def from_config(self) -> LayoutChoice:
        """Return the choice that the settings define."""
        parallel, place = self.config.parallel, self.place
        r = parallel.r
        if r is None:
            r = place.shards if place.comm.size > 1 else 1
        return LayoutChoice(r=r, d=parallel.d, d_backward=parallel.d_backward,
                            algorithm=self.config.comm.all_to_all,
                            kernel=self.config.experts.compute, piece_axis=parallel.cut,
                            spill=(parallel.spill or "never") if place.comm.size > 1 else "never",
                            send=self.sends()[0])

    def legal(self) -> list[int]:
        """Return the values of r that this layer supports."""
        place = self.place
        if not self.supports_gather:
            return [place.shards]
        legal = legal_r(place.experts, place.comm.size, place.shards)
        # r = 0 is excluded with a stash, because a rank's own rows are not bounded
        return legal if self.stash is None else [r for r in legal if r]

    def sends(self) -> list[str]:
        """Return how often a token's row may be sent. The configured value comes first.

        With bounded rows there is a single value, since all slots are sent whether used or not."""
        named, comm = self.config.dispatch.send, self.place.comm
        if named != "auto" and comm.size > 1:
            return [named]
        if comm.size == 1 or not self.traits.sends_once or self.traits.bounded:
            return ["rows"]
        return ["rows", "ranks", *["nodes"] * (comm.topology.why_flat() is None)]

    def visited_copies(self) -> list[int]:
        """Return the values of r for which the visited ranks and nodes of tokens are counted."""
        return [r for r in self.legal() if r] if len(self.sends()) > 1 else []

    def piece_axes(self, send: str) -> tuple[str, ...]:
        """Return the axes along which rows that are sent in this way can be divided."""
        axes = self.traits.piece_axes
        return axes if send == "rows" else tuple(
            axis for axis in axes if axis in OnceDispatcher.traits.piece_axes)

    def at(self, choice: LayoutChoice) -> LayerLayout:
        """Return the layout of a choice. Raises `ValueError` if the layer does not support it."""
        if choice not in self._made:
            self._made[choice] = self._make(choice)
        return self._made[choice]

    def _make(self, choice: LayoutChoice) -> LayerLayout:
        self._check(choice)
        place = dataclasses.replace(self.place, algorithm=self._algorithm(choice.algorithm))
        if place.comm.size == 1 or choice.r == 0:
            layout = self._alone(choice, place)
        elif choice.gather_tokens:
            layout = self._layout(choice, AllGatherDispatcher(DispatchContext(place)))
        else:
            layout = self._exchanging(choice, place)
        if not self.config.experts.weights_first or choice.send != "rows":
            return layout
        return dataclasses.replace(layout, dispatcher=WeightsFirst(layout.dispatcher))

    def _layout(self, choice: LayoutChoice, dispatcher: Dispatcher, **more: Any) -> LayerLayout:
        configured = choice.kernel == self.config.experts.compute or self.config.batch_invariant
        return LayerLayout(choice, dispatcher, self.experts,
                           None if configured else strategies.get(choice.kernel), **more)

    def _alone(self, choice: LayoutChoice, place: Placement) -> LayerLayout:
        """Return a layout without an all-to-all, which gathers experts from other ranks if any."""
        context = DispatchContext(
            Placement(LocalComm(), place.experts, place.algorithm), configured=self.traits,
            counts_on_device=self.experts.supports_gather and takes_counts_of_device(choice.kernel))
        return self._layout(choice, LocalDispatcher(context), gathered_shards=place.shards,
                            gather=place.comm if place.comm.size > 1 else None)

    def _exchanging(self, choice: LayoutChoice, place: Placement) -> LayerLayout:
        """Return a layout that exchanges rows, and that borrows experts if rows spill."""
        place = dataclasses.replace(place, copies=choice.r)
        overlap = Overlap(choice.d, choice.d_backward, self.config.experts.shared_overlap,
                          choice.piece_axis)
        planner = None if choice.spill == "never" else self._spill_planner(choice.spill)
        kind = self._sending(choice.send)
        dispatcher = kind(DispatchContext(place, overlap, self.limit, planner,
                                          weights_first=self.config.experts.weights_first))
        if planner is not None:
            dispatcher = BorrowingDispatcher(dispatcher, self.experts)
        shards = place.token_shards
        return self._layout(choice, dispatcher, gathered_shards=shards, stash=self.stash,
                            gather=place.comm.contiguous_subgroup(shards) if shards > 1 else None,
                            first_shard=place.shard // shards * shards)

    def _sending(self, send: str) -> type[Dispatcher]:
        """Return the dispatcher class. Sending per node needs several nodes with several ranks."""
        if send == "rows":
            return self.dispatcher
        flat = send == "ranks" or self.place.comm.topology.why_flat()
        if self.traits.bounded:
            return BoundedOnceDispatcher if flat else BoundedOnceToNodesDispatcher
        return OnceDispatcher if flat else OnceToNodesDispatcher

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
                    f"dispatch.stash_mib={self.config.dispatch.stash_mib} cannot be combined with "
                    f"{what}, whose rows do not use pages. Use {instead}, or dispatch.stash_mib=0")

    def _check(self, choice: LayoutChoice) -> None:
        place, size, legal = self.place, self.place.comm.size, self.legal()
        if self.stash is not None:
            self._check_stash(choice)
        if choice.r not in legal and not (size == 1 and choice.r == 0):
            raise ValueError(
                f"parallel.r={choice.r} does not fit {place.experts} experts on {size} "
                f"expert-parallel ranks. Choose one of {legal}; the nearest is "
                f"{min(legal, key=lambda r: abs(r - choice.r))}")
        if choice.gather_tokens and (not self.gathers_tokens or choice.r != place.shards):
            raise ValueError(
                f"gather_tokens with r={choice.r} does not fit {size} expert-parallel ranks, "
                f"dispatch.name={self.config.dispatch.name!r} and parallel.replicas="
                f"{self.config.parallel.replicas}. Set gather_tokens to False, or use r="
                f"{place.shards} with 'ragged' or 'padded' and one replica")
        if not self.traits.supports_pieces and (choice.d > 1 or choice.backward_d > 1):
            raise ValueError(
                f"parallel.d={choice.d}, d_backward={choice.d_backward} cannot be combined with "
                f"dispatch.name={self.config.dispatch.name!r}, which cannot divide its rows into "
                "pieces. Use 1 and 0, or dispatch.name='ragged' or 'padded'")
        if choice.piece_axis not in self.traits.piece_axes:
            raise ValueError(
                f"parallel.cut={choice.piece_axis!r} cannot be combined with dispatch.name="
                f"{self.config.dispatch.name!r}. Choose one of {list(self.traits.piece_axes)}, or "
                "use dispatch.name='ragged'")
        self._check_spill(choice)
        self._check_send(choice)

    def _check_send(self, choice: LayoutChoice) -> None:
        if choice.send == "rows":
            return
        pieces, axes = max(choice.d, choice.backward_d), self.piece_axes(choice.send)
        for what, instead, ok in (
                (f"dispatch.name={self.config.dispatch.name!r}",
                 "dispatch.name='ragged' or 'bounded'", self.traits.sends_once),
                (f"parallel.r={choice.r}, gather_tokens={choice.gather_tokens}",
                 "a layout in which rows travel", choice.exchanges),
                (f"dispatch.stash_mib={self.config.dispatch.stash_mib}", "dispatch.stash_mib=0",
                 self.stash is None),
                (f"parallel.cut={choice.piece_axis!r}", f"one of {list(axes)}",
                 pieces == 1 or choice.piece_axis in axes)):
            if not ok:
                raise ValueError(f"dispatch.send={choice.send!r} cannot be combined with {what}. "
                                 f"Use {instead}, or dispatch.send='rows'")

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
            why = bad[0] if bad else f"{place.comm.size} expert-parallel rank: use more ranks"
            raise ValueError(f"parallel.spill={choice.spill!r} cannot be combined with {why}, or "
                             "parallel.spill='never'")

    def _spill_planner(self, policy: str) -> SpillPlanner:
        """Return a planner that uses the loads of a call, or of earlier steps (`standing`)."""
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
        return with_wire(algorithms.get(name), comm.wire, comm.wire_back)
