"""The gradient scale and the log of Megatron's auxiliary losses.

In Megatron-core 0.15 to 0.17, the log is a dict in `moe_utils`. From 0.18 on, it is a
`MoEMetricsTracker`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

Group = dist.ProcessGroup


def attach_loss(activation: Tensor, loss: Tensor) -> Tensor:
    """Return `activation` unchanged. The gradient of `loss` is scaled as in Megatron."""
    return moe_utils.MoEAuxLossAutoScaler.apply(activation, loss)


def scaled_losses(factor: float) -> contextlib.AbstractContextManager[None]:
    """Multiply the gradients of auxiliary losses by `factor` inside the block."""
    before = moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale
    return auxiliary_scale(None if before is None else before * factor)


@contextlib.contextmanager
def auxiliary_scale(scale: Tensor | None) -> Iterator[None]:
    """Inside the block, set the gradient scale of auxiliary losses."""
    scaler = moe_utils.MoEAuxLossAutoScaler
    before = scaler.main_loss_backward_scale
    scaler.main_loss_backward_scale = scale  # `set_loss_scale` would overwrite `before` in place
    try:
        yield
    finally:
        scaler.main_loss_backward_scale = before


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
