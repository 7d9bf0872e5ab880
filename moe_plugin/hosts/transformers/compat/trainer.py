"""Methods of `transformers.Trainer` for models whose experts this package computes.

Importing `moe_plugin.hosts.transformers` replaces them, so that `Trainer` and its subclasses, such
as those of TRL, save and resume under expert parallelism and weight the auxiliary loss correctly.
See `checkpoints` and `balance`. The original methods are called for all other models, for models in
`peft`, and with DeepSpeed and the FSDP of accelerate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel, Trainer

from moe_plugin.hosts.transformers.compat import balance, checkpoints
from moe_plugin.hosts.transformers.register import computes_experts

Method = Callable[..., Any]
_METHODS: dict[str, Method] = {
    "_save_checkpoint": checkpoints.save_checkpoint, "_save": checkpoints.save_weights,
    "_save_optimizer_and_scheduler": checkpoints.save_optimizer,
    "_load_optimizer_and_scheduler": checkpoints.load_optimizer,
    "_load_from_checkpoint": checkpoints.load_model, "_load_best_model": checkpoints.load_best,
    "compute_loss": balance.compute_loss}


def extend_trainer() -> None:
    """Replace the methods of `Trainer`. Later calls have no effect."""
    if hasattr(Trainer.__init__, "_moe_plugin_original"):
        return
    for name, ours in _METHODS.items():
        setattr(Trainer, name, _around(getattr(Trainer, name), ours, _is_ours))
    setattr(Trainer, "__init__", _around(Trainer.__init__, _create, lambda trainer: True))


def _around(original: Method, ours: Method, applies: Callable[[Any], bool]) -> Method:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not applies(self):
            return original(self, *args, **kwargs)
        return ours(original, self, *args, **kwargs)

    method._moe_plugin_original = original  # type: ignore[attr-defined]
    return method


def _is_ours(trainer: Any) -> bool:
    return (isinstance(trainer.model, PreTrainedModel) and computes_experts(trainer.model)
            and not trainer.is_fsdp_enabled and not trainer.is_deepspeed_enabled)


def _create(original: Method, self: Any, model: Any = None, args: Any = None, *rest: Any,
            **more: Any) -> None:
    """`Trainer.__init__`, without its refusal to save the optimizer of a distributed model."""
    accepts = (args is not None and not args.save_only_model
               and getattr(model, "is_distributed_loading_by_transformers", False)
               and computes_experts(model))
    if accepts:
        args.save_only_model = True
    try:
        original(self, model, args, *rest, **more)
    finally:
        if accepts:
            args.save_only_model = False
