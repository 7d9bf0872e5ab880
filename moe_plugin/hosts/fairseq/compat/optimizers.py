"""Fused Adam and multi-tensor gradient functions inside fairseq's optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_plugin.hosts.fairseq.compat.patching import (
    add_field,
    patch,
    replaces,
    store_in_hydra,
)
from moe_plugin.training.gradients import fused, multi_tensor

logger = logging.getLogger(__name__)


@patch
def fused_adam_flag() -> None:
    """`--moe-fused-adam`: fairseq's Adam by torch's fused kernels, on CPU and GPU.

    fairseq <= 0.12.3 has a fused Adam on a CUDA device with apex only.
    """
    from fairseq.optim.adam import FairseqAdamConfig

    add_field(FairseqAdamConfig, "moe_fused_adam", bool, False,
              "Adam by torch's fused kernels, on CPU and GPU, without apex; equal up to rounding")
    store_in_hydra("optimizer", "adam", FairseqAdamConfig)


@replaces("optim.adam.FairseqAdam.__init__")
def fused_adam(original: Callable[..., None], self: Any, cfg: Any, params: Any) -> None:
    """See `fused_adam_flag`."""
    from fairseq.optim import FairseqOptimizer

    params = list(params)
    # the settings of other projects' tests and of old checkpoints lack fields
    half = getattr(cfg, "fp16_adam_stats", False)
    choice = fused.fairseq_adam(
        _dtypes(params), torch_fused=getattr(cfg, "moe_fused_adam", False),
        old=getattr(cfg, "use_old_adam", False), fp16_stats=half)
    logger.info("Adam of %s: %s", choice.active, choice.reason)
    if choice.active != "torch":
        original(self, cfg, params)
        return
    from moe_plugin.hosts.fairseq.adam import FusedAdam

    FairseqOptimizer.__init__(self, cfg)
    self._optimizer = FusedAdam(params, half=half, **self.optimizer_config)


def _dtypes(params: list[Any]) -> set[torch.dtype]:
    """Of parameters or of groups of them."""
    groups = [p["params"] if isinstance(p, dict) else [p] for p in params]
    return {parameter.dtype for group in groups for parameter in group}


@replaces("utils.clip_grad_norm_")
def clip_all_at_once(original: Callable[..., Tensor], params: Any, max_norm: float,
                     aggregate_norm_fn: Any = None) -> Tensor:
    """Clip all gradients at once, and leave them alone where nothing has to be clipped.

    fairseq <= 0.12.3 launches one kernel per parameter, for a factor of 1, too.
    """
    params = [params] if isinstance(params, Tensor) else list(params)
    norm = original(params, 0, aggregate_norm_fn)
    if max_norm > 0:
        # fairseq's trainer waits for the norm in any case; not (>= 1): NaN reaches all
        factor = float((float(max_norm) / (norm + 1e-6)).clamp(max=1))
        if not factor >= 1:
            multi_tensor.scale_([p.grad for p in params if p.grad is not None], factor)
    return norm


@replaces("optim.FairseqOptimizer.multiply_grads")
def scale_all_at_once(_: Any, self: Any, c: float | Tensor) -> None:
    """fairseq <= 0.12.3 launches one kernel per parameter."""
    multi_tensor.scale_([p.grad for p in self.params if p.grad is not None], c)
