"""`LayerLayout`, which determines whether a layer sends tokens to the experts, gathers the experts'
parameters, or does both.

With r = 0, the parameters of all experts are gathered, and tokens stay on their ranks. With r >= 1,
each token is sent to r ranks for each of its experts. See `comm.placement.Placement` and
docs/adaptive.md.
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
    """Methods and attributes of experts that layouts use; see `moe_plugin.experts.Experts`."""

    later: LaterGrads | None
    stored: bool

    @property
    def supports_gather(self) -> bool: ...

    @property
    def traceable(self) -> bool: ...

    @property
    def anchor(self) -> Tensor | None: ...

    def compute_parameters(self, tensors: dict[str, Tensor] | None = None,
                           first_shard: int | None = None) -> FFNParameters: ...

    def gathered_parameters(self, local: dict[str, Tensor] | None, comm: Comm, shards: int,
                            first_shard: int) -> FFNParameters: ...


@dataclass(frozen=True)
class LayerLayout:
    """A layout of a layer, with all objects that are needed to call the layer.

    Attributes:
        choice: `LayoutChoice` that describes the layout.
        dispatcher: dispatcher that sends rows and returns outputs.
        experts: this rank's experts, without any adapters that wrap them.
        strategy: function that computes the experts' rows. If `strategy` is None, the configured
            strategy is used.
        gather: group of ranks whose parameters are gathered before the experts are computed, or
            None if no parameters are gathered.
        gathered_shards: number of consecutive ranks in `gather` with shards of the same expert.
        first_shard: index of this rank's first expert shard after parameters have been gathered.
        stash: pages that store the rows for the backward pass, or None if autograd stores the rows.
        label: label of the layout (`LayoutChoice.label`).
        pieces: number of pieces in which rows are sent and computed.
        plain: True if all rows are computed in one piece, without pages, using the stored
            parameters and the configured strategy.
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
        # computed once here, because every call reads them
        object.__setattr__(self, "label", self.choice.label)
        object.__setattr__(self, "pieces", self.dispatcher.overlap.pieces)
        object.__setattr__(self, "plain", self.strategy is self.gather is self.stash is None
                           and self.pieces == 1)

    @property
    def compiles(self) -> bool:
        """True if `torch.compile` may trace the steps plan, dispatch, experts and combine.

        If the host reads row counts or fetches experts, every new load would trigger a
        recompilation. Layouts in which the host reads row counts or fetches experts are therefore
        not traced. Under `torch.export`, the steps are always traced, because an exported program
        must support all loads.

        Raises:
            ValueError: If `torch.export` cannot trace this layout.
        """
        if exporting():
            self._check_export()
            return True
        traits = self.dispatcher.traits
        # there is no traceable operator for the exchange of pairs (`dispatch.bundles`)
        return (self.experts.traceable and self.choice.send == "rows"
                and (traits.fixed_slots or traits.bounded))

    def _check_export(self) -> None:
        if not self.experts.traceable:
            raise ValueError(
                f"torch.export does not support {type(self.experts).__name__}, because the host "
                "fetches or decodes the experts. Export the layer with experts.store=device and "
                "without freeze_experts")
        if self.choice.send != "rows":
            raise ValueError(f"torch.export does not support dispatch.send={self.choice.send!r}. "
                             "Export the layer with dispatch.send='rows'")

    def dispatch(self, x_TD: Tensor, plan: DispatchPlan, experts: nn.Module,
                 anchored: bool = True) -> Sent:
        """Send the rows of the tokens [T, D] to their experts (`Dispatcher.dispatch`).

        Args:
            x_TD: [T, D], the tokens of this rank.
            plan: the plan of this call.
            experts: this rank's experts, or an adapter that wraps them.
            anchored: whether a parameter connects the exchanges to the autograd graph. False is
                allowed if the tokens need gradients either on all ranks or on no rank.
        """
        anchor = None
        if experts is not self.experts:
            anchor = self._anchor_of(experts)
        elif anchored and self.dispatcher.reads_anchor:
            anchor = self.experts.anchor
        if self.plain and self.experts.later is None:
            return self.dispatcher.dispatch(x_TD, plan, anchor)
        # may gather parameters, which all ranks do before they send rows
        parameters, strategy = self._parameters(experts), self.strategy
        sent = self.dispatcher.dispatch(x_TD, plan, anchor)
        # lazily, because a piece must not be awaited before it is computed
        arriving = sent.arriving
        sent.arriving = map(partial(_computed_with, parameters, strategy), arriving)
        return sent

    def _anchor_of(self, experts: nn.Module) -> Tensor | None:
        """Return a trainable parameter of the adapter, or the anchor of the experts if the adapter
        has no trainable parameter.

        Raises:
            ValueError: If code outside the adapter computes the experts.
        """
        if self.experts.stored or self.choice.spill != "never":
            what = ("experts stored outside the device" if self.experts.stored else
                    f"parallel.spill={self.choice.spill!r}")
            raise ValueError(
                f"{type(experts).__name__} wraps a layer's experts and cannot be used with {what}, "
                "because the parameters would be used without the adapter. Merge the adapter "
                "first, or use experts.store=device and parallel.spill='never'")
        return next((p for p in experts.parameters() if p.requires_grad), self.experts.anchor)

    def _parameters(self, experts: nn.Module) -> FFNParameters | None:
        """Return the parameters for all pieces of a call, or None to use the stored parameters."""
        extras: dict[str, object] = {}
        # With several pieces, or with delayed weight gradients, exchanges of other pieces or of
        # another micro-batch run at the same time. `GradSums` adds up the weight gradients of all
        # pieces, and kernels leave processors free for the exchanges.
        if self.pieces > 1 or (self.experts.later is not None and experts is self.experts):
            extras["sums"] = GradSums()
        if self.stash is not None and may_keep():
            extras["keep"] = self.stash.keep
        if not self.experts.supports_gather or not (extras or self.gather is not None):
            return None
        # an adapter changes the parameters only inside its own `forward`
        changed = None if experts is self.experts else experts(ParameterRequest())
        if self.gather is None:
            parameters = self.experts.compute_parameters(changed)
        else:
            parameters = self.experts.gathered_parameters(
                changed, self.gather, self.gathered_shards, self.first_shard)
        return dataclasses.replace(parameters, **extras) if extras else parameters


def _computed_with(parameters: FFNParameters | None, strategy: Strategy | None,
                   work: ExpertRows) -> ExpertRows:
    # rows of borrowed experts arrive together with the parameters of these experts
    row_parameters = parameters if work.parameters is None else work.parameters
    return ExpertRows(work.x, work.rows, row_parameters, strategy, work.started)
