"""Correct the loss weights of Megatron's own router when `calculate_per_token_loss` is set.

Megatron 0.15 to 0.19 multiplies each router loss by a number of tokens:

| loss | 0.15 to 0.18 | 0.19 |
|---|---|---|
| any loss, if tensor- and context-parallel ranks share N tokens | by the rank's own tokens | by N |
| sequence loss of B sequences | by the tokens of one sequence | by the tokens of all B |

This module makes the loss weights the same as in a run in which a single rank has all tokens. In a
run with a single rank, each loss is multiplied by the number of all tokens in the micro-batch,
excluding padding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.moe import router as router_module
from torch import Tensor, nn

Count = int | Tensor


@contextlib.contextmanager
def logged_losses() -> Iterator[dict[str, Tensor]]:
    """Yield a dict. While the block runs, the dict collects the losses that Megatron's router logs,
    without their coefficients.

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

    setattr(router_module, seam, (lambda: SimpleNamespace(record=noted)) if tracked else noted)
    try:
        yield losses
    finally:
        setattr(router_module, seam, before)


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
