"""`RoutedExperts`: the path of an MoE layer behind its router, for models that route by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import Comm
from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.config import MoEConfig
from moe_plugin.config.options import check
from moe_plugin.config.tree import flatten, to_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts.base import Experts
from moe_plugin.records import KeptRouting, Routing
from moe_plugin.routing.call import check_range
from moe_plugin.tuning.layout_selector import LayoutSelector
from moe_plugin.tuning.layouts import through_experts
from moe_plugin.tuning.placement import place_experts

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
    """Plan, dispatch, experts and combine of choices that the caller made.

    It is not a module and has no parameters: `experts` says whose they are. An expert's gradient is
    the sum over the tokens of all ranks in `comm`, as of `MoELayer`. Collective.

    Args:
        config: sizes, `dispatch`, `parallel`, `comm`, `tuner` and `experts.compute` are read.
        comm: the expert-parallel group.
        experts: `experts(config, placement)` makes what computes this rank's experts.
        agreed: see `HostContext`.
    Raises:
        ValueError: config, group and experts do not fit together, or differ between ranks; see
            `check_routed`.
    """

    def __init__(self, config: MoEConfig, comm: Comm,
                 experts: Callable[[MoEConfig, Placement], Experts], *,
                 dtype: torch.dtype | None = None,
                 agreed: Mapping[str, Any] = MappingProxyType({})) -> None:
        check_routed(config, comm.size)
        # on the meta device, because the experts have their memory already
        host = HostContext(agreed=agreed)
        config, place, _ = place_experts(config, comm, dtype=dtype, device="meta", host=host)
        self.config, self.placement = config, place
        self.experts = experts(config, place)
        self.layouts = LayoutSelector(config, place, self.experts, host)

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
        tuner, traced = self.layouts.tuner, torch.compiler.is_compiling()
        layout, kept = self.layouts.select(kept, None, training)
        if tuner is not None and not traced:
            tuner.pop_decisions()  # which logs them
        return through_experts(self.experts, layout, x_TD, kept)[0]
