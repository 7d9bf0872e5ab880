"""`LayerLayout`: one layout of a layer, ready for calls.

r = 0: all parameters are gathered, tokens stay. r >= 1: tokens go to r ranks each; see
`comm.placement.Placement` and docs/adaptive.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.dispatch.base import Dispatcher, Sent
from moe_plugin.dispatch.row_pages import PagedStash, may_keep
from moe_plugin.kernels.expert_ffn import FFNParameters, Strategy
from moe_plugin.kernels.weight_grads import GradSums, LaterGrads
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.records import DispatchPlan, ExpertRows, ParameterRequest
from moe_plugin.utils.machine import exporting


class LayoutExperts(Protocol):
    """The part of `moe_plugin.experts.Experts` that a layout uses, described there."""

    later: LaterGrads | None
    stored: bool

    @property
    def supports_gather(self) -> bool: ...

    @property
    def traceable(self) -> bool: ...

    @property
    def anchor(self) -> nn.Parameter | None: ...

    def compute_parameters(self, tensors: dict[str, Tensor] | None = None,
                           first_shard: int | None = None) -> FFNParameters: ...

    def gathered_parameters(self, local: dict[str, Tensor] | None, comm: Comm, shards: int,
                            first_shard: int) -> FFNParameters: ...


@dataclass(frozen=True)
class LayerLayout:
    """One choice, made ready for calls of a layer.

    Attributes:
        choice: what it was made from.
        dispatcher: moves rows.
        experts: of the layer.
        strategy: computes rows; None: as the experts are configured.
        gather: ranks whose parameters this one gathers before it computes; None: it has what it
            needs.
        gathered_shards: consecutive ranks of `gather` that hold shards of one expert.
        first_shard: the first shard that this rank has after gathering.
        stash: pages for what backward needs; None: autograd keeps it.
        label: see `LayoutChoice`.
        pieces: in which rows travel and are computed.
        plain: experts compute what arrives as they are configured, with what they store.
    """

    choice: LayoutChoice
    dispatcher: Dispatcher
    experts: LayoutExperts
    strategy: Strategy | None = None
    gather: Comm | None = None
    gathered_shards: int = 1
    first_shard: int = 0
    stash: PagedStash | None = None
    label: str = dataclasses.field(init=False)
    pieces: int = dataclasses.field(init=False)
    plain: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.choice.label)  # of every call's statistics
        object.__setattr__(self, "pieces", self.dispatcher.overlap.pieces)
        object.__setattr__(self, "plain", self.strategy is self.gather is self.stash is None
                           and self.pieces == 1)

    @property
    def compiles(self) -> bool:
        """Whether `torch.compile` may trace plan, dispatch, experts and combine.

        Where `plan` reads rows by expert on the host, or experts are fetched, every new load would
        be compiled again. `torch.export` makes one program for any load.

        Raises:
            ValueError: `torch.export` of experts that are fetched.
        """
        if exporting():
            self._check_export()
            return True
        traits = self.dispatcher.traits
        # pairs travel by exchanges that no graph holds
        return (self.experts.traceable and self.choice.send == "rows"
                and (traits.fixed_slots or traits.bounded))

    def _check_export(self) -> None:
        if not self.experts.traceable:
            raise ValueError(
                f"{type(self.experts).__name__} are fetched by the host, which an exported program "
                "has none of: must be on the device; export with experts.store=device")
        if self.choice.send != "rows":
            raise ValueError(f"dispatch.send={self.choice.send!r} does not fit torch.export, which "
                             "traces no exchange of pairs: export with dispatch.send='rows'")

    def dispatch(self, x_TD: Tensor, plan: DispatchPlan, experts: nn.Module,
                 anchored: bool = True) -> Sent:
        """Rows of tokens [T, D] on their way to their experts; see `Dispatcher.dispatch`.

        Args:
            experts: of the layer, or what stands in their place.
            anchored: False where all ranks' tokens have gradients, or none's.
        """
        anchor = None
        if experts is not self.experts:
            anchor = self._anchor_of(experts)
        elif anchored and self.dispatcher.reads_anchor:
            anchor = self.experts.anchor
        if self.plain and self.experts.later is None:
            return self.dispatcher.dispatch(x_TD, plan, anchor)
        parameters, strategy = self._parameters(experts), self.strategy  # before rows travel
        sent = self.dispatcher.dispatch(x_TD, plan, anchor)
        arriving = sent.arriving
        sent.arriving = map(partial(_computed_with, parameters, strategy), arriving)
        return sent

    def _anchor_of(self, experts: nn.Module) -> Tensor | None:
        """A parameter that is trained where one of an adapter's is.

        Raises:
            ValueError: what stands in the experts' place does not reach all that compute them.
        """
        if self.experts.stored or self.choice.spill != "never":
            what = ("experts outside the device" if self.experts.stored else
                    f"parallel.spill={self.choice.spill!r}")
            raise ValueError(
                f"{type(experts).__name__} in the place of a layer's experts does not fit {what}, "
                "where others compute with their parameters: must be experts on the device and "
                "parallel.spill='never'; merge the adapter first, or set them so")
        return next((p for p in experts.parameters() if p.requires_grad), self.experts.anchor)

    def _parameters(self, experts: nn.Module) -> FFNParameters | None:
        """What all pieces compute with, and share their gradients; None: what is stored."""
        more: dict[str, object] = {}
        # exchanges of the other pieces run next to their matmuls, or those of another micro-batch,
        # which weight gradients that are left for later wait for: kernels leave them processors
        if self.pieces > 1 or (self.experts.later is not None and experts is self.experts):
            more["sums"] = GradSums()
        if self.stash is not None and may_keep():
            more["keep"] = self.stash.keep
        if not self.experts.supports_gather or not (more or self.gather is not None):
            return None
        changed = None if experts is self.experts else experts(ParameterRequest())
        if self.gather is None:
            parameters = self.experts.compute_parameters(changed)
        else:
            parameters = self.experts.gathered_parameters(
                changed, self.gather, self.gathered_shards, self.first_shard)
        return dataclasses.replace(parameters, **more) if more else parameters


def _computed_with(parameters: FFNParameters | None, strategy: Strategy | None,
                   work: ExpertRows) -> ExpertRows:
    """The same rows; borrowed experts come with parameters of their own."""
    own = parameters if work.parameters is None else work.parameters
    return ExpertRows(work.x, work.rows, own, strategy, work.started)
