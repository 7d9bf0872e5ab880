"""All layouts that a layer can use with the parameters that it stores.

A change of layout neither moves parameters nor changes the output. With r = 0, all parameters are
gathered, and tokens stay on their rank. With r >= 1, the row of a token is sent to r ranks for each
chosen expert, and each of these ranks computes 1/r of the expert's inner width. See
`records.Placement` and docs/adaptive.md.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from moe_plugin.comm import LocalComm, algorithms
from moe_plugin.comm.exchange import Exchange
from moe_plugin.comm.placement import Placement
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import DispatchContext, Dispatcher, PagedStash, dispatchers
from moe_plugin.dispatch.all_gather import AllGatherDispatcher
from moe_plugin.dispatch.base import Overlap, SpillPlanner
from moe_plugin.dispatch.bounded_once import BoundedOnceDispatcher, BoundedOnceToNodesDispatcher
from moe_plugin.dispatch.layout import LayerLayout
from moe_plugin.dispatch.once import OnceDispatcher
from moe_plugin.dispatch.once_nodes import OnceToNodesDispatcher
from moe_plugin.dispatch.rows import LocalDispatcher
from moe_plugin.dispatch.rows_limit import RowsLimit
from moe_plugin.dispatch.weights_first import WeightsFirst
from moe_plugin.dispatch.wire import with_wire
from moe_plugin.experts import Experts, strategies
from moe_plugin.kernels.expert_ffn import KEEPS_ROWS
from moe_plugin.planner.choice import LayoutChoice, legal_r
from moe_plugin.planner.layer_cost import spill_costs
from moe_plugin.planner.spill import plan_spill
from moe_plugin.tuning.borrowed import BorrowingDispatcher
from moe_plugin.tuning.compute_tuner import takes_counts_of_device
from moe_plugin.tuning.default_hardware import default_cluster, default_device, layer_shape
from moe_plugin.tuning.standing import LayerReplicas


class Layouts:
    """The layouts that one layer can use. Each layout is created when it is first requested.

    All ranks must request the same layouts, because the creation of a layout may require
    communication.

    Args:
        config: settings of the layer.
        place: placement that states which ranks store the layer's parameters.
        experts: experts of the layer.

    Attributes:
        limit: row limit of a dispatcher with bounded rows, or None.
        stash: pages for tensors that backward needs; see `LayerLayout`.
        spills: whether ranks other than the owner may compute rows of an expert.
        replicas: replicas of experts if `parallel.spill` is `standing`, or None.
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
        """Restore the state of a copy. A copied object must request its own pages."""
        vars(self).update(state)
        if self.stash is not None:
            self.stash.ask(self, self.config.dispatch)

    def from_config(self) -> LayoutChoice:
        """Return the layout that the settings specify."""
        parallel, place = self.config.parallel, self.place
        r, algorithm = parallel.r, self.config.comm.all_to_all
        assert algorithm is not None  # set with the placement
        if r is None:
            r = place.shards if place.comm.size > 1 else 1
        return LayoutChoice(r=r, d=parallel.d, d_backward=parallel.d_backward,
                            algorithm=algorithm,
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
        """Return the possible values of `LayoutChoice.send`. The configured value is first in the
        list.

        With bounded rows, there is only one value, because all slots are sent, whether they are
        used or not.
        """
        named, comm = self.config.dispatch.send, self.place.comm
        if named != "auto" and comm.size > 1:
            return [named]
        if comm.size == 1 or not self.traits.sends_once or self.traits.bounded:
            return ["rows"]
        return ["rows", "ranks", *["nodes"] * (comm.topology.why_flat() is None)]

    def visited_copies(self) -> list[int]:
        """Return the values of r for which the tuner counts visited ranks and nodes."""
        return [r for r in self.legal() if r] if len(self.sends()) > 1 else []

    def piece_axes(self, send: str) -> tuple[str, ...]:
        """Return the axes along which rows can be divided for this value of `send`."""
        axes = self.traits.piece_axes
        return axes if send == "rows" else tuple(
            axis for axis in axes if axis in OnceDispatcher.traits.piece_axes)

    def at(self, choice: LayoutChoice) -> LayerLayout:
        """Return the layout for a choice. Raise `ValueError` if the layer does not support it."""
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
        """Create a layout without an all-to-all. With several ranks, the layout gathers experts."""
        context = DispatchContext(
            Placement(LocalComm(), place.experts, place.algorithm), configured=self.traits,
            counts_on_device=self.experts.supports_gather and takes_counts_of_device(choice.kernel))
        return self._layout(choice, LocalDispatcher(context), gathered_shards=place.shards,
                            gather=place.comm if place.comm.size > 1 else None)

    def _exchanging(self, choice: LayoutChoice, place: Placement) -> LayerLayout:
        """Create a layout that exchanges rows and, if rows may spill, borrows experts."""
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
        """Return the dispatcher class. `nodes` requires several nodes with several ranks each."""
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
                    f"{what}, whose rows are not stored in pages. Use {instead}, or "
                    "dispatch.stash_mib=0")

    def _check(self, choice: LayoutChoice) -> None:
        place, size, legal = self.place, self.place.comm.size, self.legal()
        if self.stash is not None:
            self._check_stash(choice)
        if choice.r not in legal and not (size == 1 and choice.r == 0):
            raise ValueError(
                f"parallel.r={choice.r} is not possible with {place.experts} experts on {size} "
                f"expert-parallel ranks. Choose one of {legal}; the nearest is "
                f"{min(legal, key=lambda r: abs(r - choice.r))}")
        if choice.gather_tokens and (not self.gathers_tokens or choice.r != place.shards):
            raise ValueError(
                f"gather_tokens with r={choice.r} is not possible on {size} expert-parallel ranks "
                f"with dispatch.name={self.config.dispatch.name!r} and parallel.replicas="
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
        """Return a planner that uses this call's loads or, for `standing`, those of past steps."""
        comm, probe = self.place.comm, self.experts.anchor
        assert probe is not None
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
