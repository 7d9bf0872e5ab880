"""Fused Adam and multi-tensor gradient functions inside fairseq's optimizers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_plugin.gradients import fused, multi_tensor
from moe_plugin.hosts.fairseq.compat.fields import add_field

logger = logging.getLogger(__name__)


def fused_adam() -> None:
    """`--moe-fused-adam`: fairseq's Adam by torch's fused kernels, on CPU and GPU.

    fairseq <= 0.12.3 has a fused Adam on a CUDA device with apex only.
    """
    from fairseq.optim import FairseqOptimizer
    from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
    from hydra.core.config_store import ConfigStore

    add_field(FairseqAdamConfig, "moe_fused_adam", bool, False,
              "Adam by torch's fused kernels, on CPU and GPU, without apex; equal up to rounding")
    node: Any = FairseqAdamConfig()  # Hydra has one without the new field
    node._name = "adam"
    ConfigStore.instance().store(name="adam", group="optimizer", node=node, provider="moe_plugin")
    original = FairseqAdam.__init__

    @functools.wraps(original)
    def __init__(self: Any, cfg: Any, params: Any) -> None:
        params = list(params)
        # the settings of other projects' tests and of old checkpoints lack fields
        choice = fused.fairseq_adam(
            _dtypes(params), torch_fused=getattr(cfg, "moe_fused_adam", False),
            old=getattr(cfg, "use_old_adam", False),
            fp16_stats=getattr(cfg, "fp16_adam_stats", False))
        logger.info("Adam of %s: %s", choice.active, choice.reason)
        if choice.active != "torch":
            original(self, cfg, params)
            return
        from moe_plugin.hosts.fairseq.adam import FusedAdam

        FairseqOptimizer.__init__(self, cfg)
        self._optimizer = FusedAdam(params, **self.optimizer_config)

    FairseqAdam.__init__ = __init__


def _dtypes(params: list[Any]) -> set[torch.dtype]:
    """Of parameters or of groups of them."""
    groups = [p["params"] if isinstance(p, dict) else [p] for p in params]
    return {parameter.dtype for group in groups for parameter in group}


def multi_tensor_gradients() -> None:
    """Scale and clip all gradients at once, and leave them alone where nothing has to be clipped.

    fairseq <= 0.12.3 launches one kernel per parameter, for a factor of 1, too.
    """
    from fairseq import utils
    from fairseq.optim import FairseqOptimizer

    original = utils.clip_grad_norm_

    def clip_grad_norm_(params: Any, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        params = [params] if isinstance(params, Tensor) else list(params)
        norm = original(params, 0, aggregate_norm_fn)
        if max_norm > 0:
            # fairseq's trainer waits for the norm in any case; not (>= 1): NaN reaches all
            factor = float((float(max_norm) / (norm + 1e-6)).clamp(max=1))
            if not factor >= 1:
                multi_tensor.scale_([p.grad for p in params if p.grad is not None], factor)
        return norm

    def multiply_grads(self: Any, c: float | Tensor) -> None:
        multi_tensor.scale_([p.grad for p in self.params if p.grad is not None], c)

    utils.clip_grad_norm_ = clip_grad_norm_
    FairseqOptimizer.multiply_grads = multiply_grads


SHIMS: tuple[Callable[[], None], ...] = (fused_adam, multi_tensor_gradients)
