"""The gradient scale, the weights and the log of Megatron's auxiliary losses.

In Megatron-core 0.15 to 0.17, the log is a dict in `moe_utils`. From 0.18 on, it is a
`MoEMetricsTracker`.

If `calculate_per_token_loss` is set, Megatron 0.15 to 0.19 multiplies each loss of its own router
by a number of tokens:

| loss | 0.15 to 0.18 | 0.19 |
|---|---|---|
| any loss, if tensor- and context-parallel ranks share N tokens | by the rank's own tokens | by N |
| sequence loss of B sequences | by the tokens of one sequence | by the tokens of all B |

`weighed_by_tokens` makes the loss weights the same as in a run in which a single rank has all
tokens. In a run with a single rank, each loss is multiplied by the number of all tokens in the
micro-batch, excluding padding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as router_module
from torch import Tensor, nn

from moe_plugin.utils.replaced import replaced

Group = dist.ProcessGroup
Count = int | Tensor


def attach_loss(activation: Tensor, loss: Tensor) -> Tensor:
    """Return `activation` unchanged. The gradient of `loss` is scaled as in Megatron."""
    return moe_utils.MoEAuxLossAutoScaler.apply(activation, loss)


def scaled_losses(factor: float) -> contextlib.AbstractContextManager[None]:
    """Multiply the gradients of auxiliary losses by `factor` inside the block."""
    before = moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale
    return auxiliary_scale(None if before is None else before * factor)


def auxiliary_scale(scale: Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Inside the block, set the gradient scale of auxiliary losses."""
    # `set_loss_scale` would overwrite the earlier scale in place
    return replaced(moe_utils.MoEAuxLossAutoScaler, main_loss_backward_scale=scale)


def log_loss(name: str, value: Tensor, layer_number: int | None, config: Any,
             part_of: Group | None) -> None:
    """Add an auxiliary loss, not multiplied by its coefficient, to Megatron's log.

    When Megatron reads the log, it sums the values over the ranks in `part_of`.
    """
    layers = config.num_layers + (getattr(config, "mtp_num_layers", None) or 0)
    # the log has one entry per prediction, but a hybrid model may have several layers in it
    index = None if layer_number is None else min(layer_number, layers)
    moe_utils.save_to_aux_losses_tracker(name, value.detach(), index, layers, reduce_group=part_of)


@dataclass(frozen=True)
class LoggedLoss:
    """The logged sums of one loss, with shape [layers], and how to reduce these sums over ranks."""

    values: Tensor
    reduce_group: Group | None
    average_data_parallel: bool


def _loss_records() -> dict[str, Any]:
    """Return Megatron's records of auxiliary losses, by name. A record is a dict up to Megatron
    0.17, and an object from 0.18 on.
    """
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        return moe_utils.get_moe_layer_wise_logging_tracker()
    return get_moe_metrics_tracker().metrics


def forget_losses() -> None:
    """Delete all records of auxiliary losses, and reset their gradient scale."""
    _loss_records().clear()
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None


def logged_losses() -> dict[str, LoggedLoss]:
    """Return the current rank's log of auxiliary losses."""
    return {name: _logged(record) for name, record in _loss_records().items()}


def _logged(record: Any) -> LoggedLoss:
    if isinstance(record, dict):  # up to 0.17
        return LoggedLoss(record["values"], record.get("reduce_group"),
                          not record.get("reduce_group_has_dp", False))
    return LoggedLoss(record.values, record.reduce_group, record.needs_dp_avg)


def losses_so_far() -> dict[str, Tensor]:
    """Return a copy of the logged sums of all losses. `set_logged_losses` restores the copy."""
    return {name: entry.values.clone() for name, entry in logged_losses().items()}


def set_logged_losses(values: dict[str, Tensor]) -> None:
    """Set each logged sum to its value in `values`, or to zero if `values` lacks the loss."""
    for name, entry in logged_losses().items():
        entry.values.copy_(values.get(name, torch.zeros_like(entry.values)))


@contextlib.contextmanager
def router_losses() -> Iterator[dict[str, Tensor]]:
    """Yield a dict that collects the losses that Megatron's router logs inside the block.

    The keys of the dict are the names of the losses in Megatron's log. To log losses, Megatron uses
    a tracker object from 0.18 on, and a function in earlier versions.
    """
    tracked = hasattr(router_module, "get_moe_metrics_tracker")
    seam = "get_moe_metrics_tracker" if tracked else "save_to_aux_losses_tracker"
    losses, before = dict[str, Tensor](), getattr(router_module, seam)
    log: Any = before().record if tracked else before

    def noted(name: str, value: Tensor, *args: Any, **kwargs: Any) -> None:
        losses[name] = value.detach()
        log(name, value, *args, **kwargs)

    with replaced(router_module, **{
            seam: (lambda: SimpleNamespace(record=noted)) if tracked else noted}):
        yield losses


@contextlib.contextmanager
def weighed_by_tokens(router: nn.Module, local: Count, every: Count, ranks: int) -> Iterator[None]:
    """Inside the block, multiply the losses of this router by the number of all tokens in the
    micro-batch. This weighting is the same in every Megatron version.

    The values in Megatron's log do not change.

    Args:
        router: Megatron's `TopKRouter`.
        local: number of tokens on the current rank, excluding padding.
        every: number of tokens on all ranks that share the micro-batch, excluding padding.
        ranks: number of ranks that share the micro-batch.
    """
    local, every = (max(1, n) if isinstance(n, int) else n.clamp(min=1) for n in (local, every))
    attach: Any = router.attach_and_log_load_balancing_loss

    def weighed(activation: Tensor, coefficient: float, loss: Tensor, *args: Any,
                **kwargs: Any) -> Tensor:
        # both are multiplied, because the function logs loss / coefficient
        return attach(activation, coefficient * every, loss * every, *args, **kwargs)

    config: Any = copy.copy(router.config)
    # the router averages each rank's own z loss over the ranks
    if config.moe_z_loss_coeff is not None:
        config.moe_z_loss_coeff = config.moe_z_loss_coeff * local * ranks
    inside = {"attach_and_log_load_balancing_loss": weighed, "config": config,
              "calculate_per_token_loss": False}
    before = {name: vars(router)[name] for name in inside if name in vars(router)}
    vars(router).update(inside)
    try:
        yield
    finally:
        del router.attach_and_log_load_balancing_loss
        vars(router).update(before)
