"""Megatron's own router under `calculate_per_token_loss`, versions 0.15 to 0.19.

| loss | 0.15 to 0.18 | 0.19 |
|---|---|---|
| each loss, where tensor- and context-parallel ranks share N tokens | weighed by a rank's own | N |
| sequence loss, B sequences | weighed by the tokens of one of them | of all B |

Right is what one rank with all tokens computes: each loss weighed by all tokens of the micro-batch
that are not padding.
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
    """Inside, the dict gets the raw losses that Megatron's router logs, by their names in its log.

    Versions since 0.18 log by a tracker, earlier ones by a function.
    """
    tracked = hasattr(router_module, "get_moe_metrics_tracker")
    seam = "get_moe_metrics_tracker" if tracked else "save_to_aux_losses_tracker"
    found, before = dict[str, Tensor](), getattr(router_module, seam)
    log: Any = before().record if tracked else before

    def noted(name: str, value: Tensor, *args: Any, **kwargs: Any) -> None:
        found[name] = value.detach()
        log(name, value, *args, **kwargs)

    setattr(router_module, seam, (lambda: SimpleNamespace(record=noted)) if tracked else noted)
    try:
        yield found
    finally:
        setattr(router_module, seam, before)


@contextlib.contextmanager
def weighed_by_tokens(router: nn.Module, own: Count, every: Count, ranks: int) -> Iterator[None]:
    """Inside, the losses of a call of this router are weighed so in every version; logged values
    stay as they are.

    Args:
        router: Megatron's `TopKRouter`.
        own: tokens of this rank without padding.
        every: of all ranks that share the micro-batch.
        ranks: how many these are.
    """
    own, every = (max(1, n) if isinstance(n, int) else n.clamp(min=1) for n in (own, every))
    attach: Any = router.attach_and_log_load_balancing_loss

    def weighed(activation: Tensor, coefficient: float, loss: Tensor, *args: Any,
                **kwargs: Any) -> Tensor:
        # it logs loss / coefficient
        return attach(activation, coefficient * every, loss * every, *args, **kwargs)

    config = copy.copy(router.config)
    if config.moe_z_loss_coeff is not None:  # it takes the mean of each rank's own, over ranks
        config.moe_z_loss_coeff = config.moe_z_loss_coeff * own * ranks
    inside = {"attach_and_log_load_balancing_loss": weighed, "config": config,
              "calculate_per_token_loss": False}
    before = {name: vars(router)[name] for name in inside if name in vars(router)}
    vars(router).update(inside)
    try:
        yield
    finally:
        del router.attach_and_log_load_balancing_loss
        vars(router).update(before)
