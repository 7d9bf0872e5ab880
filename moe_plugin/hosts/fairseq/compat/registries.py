"""Putting our models and trainer where fairseq looks for its own, once the user dir is loaded."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from moe_plugin.hosts.fairseq.compat.patching import Overlay, set_name, store_in_hydra


def stand_for(name: str, model: type, dataclass: type | None) -> None:
    """Let a stock model name and its architectures build `model`, a subclass of that model.

    fairseq 0.12.2 has no way to add flags to a model that is registered. Launch scripts of its
    `moe` branch say `--arch transformer_lm_gpt --moe-freq 2`; without MoE flags the subclass builds
    exactly the stock model.
    """
    from fairseq import models

    stock = models.MODEL_REGISTRY[name]
    if not issubclass(model, stock):
        raise ValueError(  # noqa: TRY004  (a wrong argument of ours)
            f"{model.__name__} cannot stand for {name!r}: it must be a subclass of {stock.__name__}"
        )
    for registry in (models.MODEL_REGISTRY, models.ARCH_MODEL_REGISTRY):
        for key, value in list(registry.items()):
            if value is stock:
                registry[key] = model
    if dataclass is not None:
        models.MODEL_DATACLASS_REGISTRY[name] = dataclass
        store_in_hydra("model", name, dataclass)
        setattr(model, "__dataclass", dataclass)


def use_trainer(trainer: type) -> None:
    """fairseq 0.12.2 names its trainer class in `fairseq_cli.train`, without a registry.
    """
    import fairseq.trainer

    set_name(fairseq.trainer, "Trainer", trainer)


def tell_of_validations() -> None:
    """fairseq 0.12.2 gives a trainer batches to validate, but not what a validation found: the
    trainer of `use_trainer` gets it, once for each.
    """
    train = sys.modules.get("fairseq_cli.train")
    stats_of = getattr(train, "get_valid_stats", None)
    if train is None or stats_of is None:
        return

    def get_valid_stats(cfg: Any, trainer: Any, stats: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(trainer, "validated"):  # --model-parallel-size > 1 takes another one
            trainer.validated(stats)
        return stats_of(cfg, trainer, stats, *args, **kwargs)

    train.get_valid_stats = get_valid_stats


def sharding_without_fairscale() -> None:
    """fairseq 0.12.2 asks for fairscale before it builds a model under `--ddp-backend
    fully_sharded`, and when it builds an optimizer under `--zero-sharding os`. The trainer of
    `use_trainer` does both without it.
    """
    import fairseq.distributed
    import fairseq.trainer

    def enable_wrap(_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    set_name(fairseq.distributed, "fsdp_enable_wrap", enable_wrap)
    fairseq.trainer.optim = Overlay(fairseq.trainer.optim, shard_=lambda optimizer, group: None)
