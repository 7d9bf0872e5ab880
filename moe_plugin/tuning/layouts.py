"""Every layout of one layer over its one storage: switching builds a plan, moves no parameter and
changes no number.

r = 0: all parameters are gathered, tokens stay. r >= 1: tokens go to r ranks each; see
`dispatch.base.Placement` and docs/adaptive.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_plugin.comm import LocalComm, algorithms
from moe_plugin.comm.base import Comm, Exchange
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import Dispatcher, dispatchers
from moe_plugin.dispatch.wire import with_wire
from moe_plugin.experts import FFNParameters, Strategy, strategies
from moe_plugin.kernels import combine_rows, gather_rows
from moe_plugin.planner.choice import LayoutChoice, legal_r
from moe_plugin.planner.shadow import ShadowModel
from moe_plugin.records import Placement, Routing, RowPlan
from moe_plugin.tuning.default_hardware import default_cluster, default_device
from moe_plugin.tuning.gathered import gathered
from moe_plugin.tuning.overlap import pieces_for, pipelined
from moe_plugin.tuning.shadows import Shadows, fetched, parted
from moe_plugin.tuning.timer import Stopwatch


@dataclass(frozen=True)
class Layout:
    """One choice, made ready. gather: ranks whose parameters this one gathers before it computes;
    None: it has what it needs.

    together: consecutive ranks of `gather` that hold shards of one expert. first_shard: the first
    shard held after gathering. cut: rows travel in pieces.
    """

    choice: LayoutChoice
    dispatcher: Dispatcher
    compute: Strategy
    gather: Comm | None
    together: int
    first_shard: int
    cut: bool

    def run(self, experts: nn.Module, x_TD: Tensor, routing: Routing, slots_TK: Tensor | None,
            limit: int | None, watch: Stopwatch | None = None,
            shadows: tuple[int, ...] = ()) -> tuple[Tensor, int]:
        """(y_TD, rows computed here): tokens through their experts and back. watch: times it.
        shadows: experts computed everywhere.
        """
        if watch is not None:
            x_TD = watch.started(x_TD, next(experts.parameters(), None))
        if shadows and self.dispatcher.placement.comm.size > 1:
            y_TD, rows = self._shadowed(experts, x_TD, routing, slots_TK, limit, shadows)
        else:
            y_TD, rows = self._run(experts, x_TD, routing, slots_TK, limit)
        return y_TD if watch is None else watch.stopped(y_TD), rows

    def _run(self, experts: nn.Module, x_TD: Tensor, routing: Routing, slots_TK: Tensor | None,
             limit: int | None) -> tuple[Tensor, int]:
        if torch.compiler.is_compiling() and not getattr(self.dispatcher, "needs_capacity", False):
            # rows by expert are read on the host: compiled, every new load would be compiled anew
            from moe_plugin.tuning.uncompiled import uncompiled

            return uncompiled(self._run, experts, x_TD, routing, slots_TK, limit)
        held = self._held(experts)
        extra = {} if not hasattr(experts, "stored") else {"held": held, "compute": self.compute}
        if hasattr(self.dispatcher, "run"):
            return self.dispatcher.run(x_TD, routing,
                                       lambda x, plan: _tokens(experts, x, plan, extra),
                                       next(experts.parameters(), None))
        # where no row leaves this rank, experts may gather and combine by themselves
        can_plan = hasattr(experts, "tokens") and hasattr(self.dispatcher, "plan")
        plan = self.dispatcher.plan(routing, slots_TK, limit) if can_plan else None
        if plan is not None:
            return experts.tokens(x_TD, plan, **extra), plan.counts.total
        anchor = next(experts.parameters(), None)
        if self.cut:
            number = pieces_for(self.choice.d, self.choice.backward_d)
            pieces = self.dispatcher.pieces(routing, slots_TK, limit, number)
            y_TD = pipelined(x_TD, pieces, lambda rows, counts: experts(rows, counts, **extra),
                             self.dispatcher.placement, self.choice.d, self.choice.backward_d,
                             anchor)
            return y_TD, sum(piece.counts.total for piece in pieces.pieces)
        rows_RD, counts, handle = self.dispatcher.dispatch(x_TD, routing, slots_TK, limit, anchor)
        return self.dispatcher.combine(experts(rows_RD, counts, **extra), handle,
                                       anchor), counts.total

    def _shadowed(self, experts: nn.Module, x_TD: Tensor, routing: Routing, slots_TK: Tensor | None,
                  limit: int | None, shadows: tuple[int, ...]) -> tuple[Tensor, int]:
        """Tokens of shadowed experts are computed here, the others travel."""
        sent, plan = parted(routing, shadows)
        held = experts.held(fetched(experts.stored(), self.dispatcher.placement, shadows), 0)
        here_TD = experts.tokens(x_TD, plan, held, self.compute)
        y_TD, rows = self._run(experts, x_TD, sent, slots_TK, limit)
        return y_TD + here_TD.to(y_TD.dtype), rows + plan.counts.total

    def _held(self, experts: nn.Module) -> FFNParameters | None:
        if self.gather is None:
            return None
        return experts.held(gathered(experts.stored(), self.gather, self.together),
                            self.first_shard)


def _tokens(experts: nn.Module, x_TD: Tensor, plan: RowPlan, extra: dict) -> Tensor:
    """Tokens through this rank's experts and back; also for experts that know rows only."""
    if hasattr(experts, "tokens"):
        return experts.tokens(x_TD, plan, **extra)
    rows_RD = experts(gather_rows(x_TD, plan.source_R, plan.position_TK), plan.counts)
    return combine_rows(rows_RD, plan.weights_TK, plan.source_R, plan.position_TK)


class Layouts:
    """The layouts of one layer, each made when it is first asked for. All ranks must ask alike:
    making one may be collective.

    Args:
        config: the layer's. place: where its parameters are stored. whole: experts that can be
            computed with gathered parameters. replay: see `HostContext`.
    """

    def __init__(self, config: MoEConfig, place: Placement, whole: bool = True, *,
                 replay: bool = False) -> None:
        self.config, self.place = config, place
        self.make = dispatchers.get(config.dispatch.name)
        # dispatchers that do it all by themselves, and those that share out slots, know one r
        self.alone = hasattr(self.make, "run")
        self.whole = whole and not self.alone and not hasattr(self.make, "splits_slots")
        self.shadows = self._shadows(whole, replay) if config.parallel.shadow else None
        self._made: dict[LayoutChoice, Layout] = {}
        self.fixed = self.from_config()
        self.at(self.fixed)

    def from_config(self) -> LayoutChoice:
        """The choice that the settings name."""
        parallel, place = self.config.parallel, self.place
        r = parallel.r if parallel.r is not None else place.shards if place.comm.size > 1 else 1
        return LayoutChoice(r=r, d=parallel.d, d_backward=parallel.d_backward,
                            algorithm=self.config.comm.all_to_all,
                            kernel=self.config.experts.compute)

    @property
    def load_comm(self) -> Comm:
        """The ranks among which loads differ: those that must agree on a capacity."""
        return LocalComm() if getattr(self.make, "same_tokens", False) else self.place.comm

    @property
    def copies(self) -> int:
        """Ranks that all route the same tokens."""
        place = self.place
        return place.comm.size if getattr(
            self.make, "same_tokens",
            False) else place.replicas.size if place.replicas is not None else 1

    @property
    def cuts(self) -> bool:
        """Whether the configured dispatcher can cut its rows in pieces."""
        return hasattr(self.make, "pieces")

    def legal(self) -> list[int]:
        """Values of r that this layer can run in."""
        return legal_r(self.place.experts, self.place.comm.size,
                       self.place.shards) if self.whole else [self.place.shards]

    def at(self, choice: LayoutChoice) -> Layout:
        """The layout of a choice. `ValueError`: it does not fit this layer; it names what does."""
        if choice not in self._made:
            self._made[choice] = self._make(choice)
        return self._made[choice]

    def _make(self, choice: LayoutChoice) -> Layout:
        place, size = self.place, self.place.comm.size
        legal = self.legal()
        if choice.r not in legal and not (size == 1 and choice.r == 0):
            raise ValueError(
                f"parallel.r={choice.r} does not fit {place.experts} experts on {size} "
                f"expert-parallel ranks: must be one of {legal}; "
                f"the nearest is {min(legal, key=lambda r: abs(r - choice.r))}")
        algorithm, compute = self._algorithm(choice.algorithm), strategies.get(choice.kernel)
        make = self.make
        if self.alone:
            if choice.d > 1 or choice.backward_d > 1:
                raise ValueError(self._cannot_cut(choice))
            return Layout(choice, make(dataclasses.replace(place, algorithm=algorithm)), compute,
                          None, 1, 0, False)
        if choice.r == 0 or (size == 1 and not hasattr(make, "splits_slots")):
            alone = Placement(LocalComm(), place.experts, algorithm)  # whole experts
            return Layout(choice, make(alone), compute, place.comm if size > 1 else None,
                          place.shards, 0, False)
        here = dataclasses.replace(place, algorithm=algorithm, copies=choice.r)
        run = here.spread
        first = place.shard // run * run
        gather = place.comm.run_of(run) if run > 1 else None
        cut = choice.d > 1 or choice.backward_d > 1
        dispatcher = make(here)
        if cut and not hasattr(dispatcher, "pieces"):
            raise ValueError(self._cannot_cut(choice))
        return Layout(choice, dispatcher, compute, gather, run, first, cut)

    def _cannot_cut(self, choice: LayoutChoice) -> str:
        return (
            f"parallel.d={choice.d}, d_backward={choice.d_backward} does not fit "
            f"dispatch.name={self.config.dispatch.name!r}, which cannot cut its rows; "
            "use 1 and 0, or 'ragged' or 'padded'")

    def _shadows(self, whole: bool, replay: bool) -> Shadows:
        c = self.config
        if not whole or self.alone:
            raise ValueError(
                f"parallel.shadow={c.parallel.shadow} does not fit custom experts or "
                f"dispatch.name={c.dispatch.name!r}; use 0"
            )
        comm = self.place.comm
        cluster, device = default_cluster(comm, comm.device), default_device(c, comm.device)
        beta = (cluster.inter if cluster.nodes > 1 else cluster.intra).beta_s
        return Shadows(
            self.place, c.parallel.shadow,
            ShadowModel(model_dim=c.model_dim, hidden_dim=c.hidden_dim, flops=device.flops,
                        bytes_s=1 / max(beta, 1e-13),
                        matrices=3 if c.experts.kind == "gated_ffn" else 2), replay=replay)

    def _algorithm(self, name: str) -> Exchange:
        comm = self.config.comm
        return self.place.algorithm if name == comm.all_to_all else with_wire(
            algorithms.get(name), comm.wire)
