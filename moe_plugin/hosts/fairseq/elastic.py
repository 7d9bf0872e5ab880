"""A fairseq run as one replica of several that come and go (`--moe-lighthouse`)."""

from __future__ import annotations

import logging
from typing import Any

from fairseq import metrics

from moe_plugin.checkpoint.formats.fairseq.translate import setting
from moe_plugin.hosts.fairseq.compat.runtime import shards_optimizer_state
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.resilience.elastic import (
    ElasticReplica,
    ModuleState,
    check_alone,
    check_settings,
)

# their rate depends on the epoch or a validation, which every replica has of its own
_OWN_RATES = ("manual", "pass_through", "reduce_lr_on_plateau")


class ElasticUpdates:
    """Averages a trainer's gradients over the replicas that live. Made in the first step, when the
    checkpoint is loaded.

    Attributes: `lost`: whether the last step was, because a replica was lost; another's state may
        have been taken in it. `replica`: what is known of the replicas.
    """

    def __init__(self, trainer: Any) -> None:
        logging.getLogger("torchft").setLevel(logging.WARNING)  # it has lines for each step
        self._trainer, flags, self.lost = trainer, trainer.cfg.model, False
        self._modules = ModuleState([trainer.get_model(), trainer.get_criterion()])
        layers = moe_layers(trainer.get_model())
        self.replica = ElasticReplica(flags.moe_lighthouse, flags.moe_replica, self._state,
                                      self._load, layers[0].moe_layer.moe.config.comm.timeout_s,
                                      progress=trainer.get_num_updates())

    def average(self) -> None:
        """Before the gradients are clipped. Collective.

        Raises:
            OverflowError: a replica was lost: fairseq then skips the step.
        """
        gradients = [parameter.grad for parameter in self._trainer.optimizer.params]
        self.lost = not self.replica.average([*gradients, *self._modules.counts()])
        if self.lost:
            raise OverflowError("a replica was lost: step skipped")
        metrics.log_scalar("replicas", self.replica.members, weight=0, priority=450, round=0)

    def _state(self) -> dict[str, Any]:
        # the trainer builds its optimizer again where it loads a checkpoint
        return {"modules": self._modules(), "optimizer": self._trainer.optimizer.state_dict(),
                "updates": self._trainer.get_num_updates()}

    def _load(self, given: dict[str, Any]) -> None:
        self._modules.load(given["modules"])
        self._trainer.optimizer.load_state_dict(given["optimizer"])
        self._trainer.set_num_updates(given["updates"])


def wants_replicas(cfg: Any, has_experts: bool) -> bool:
    """Whether the run is one replica of several. `ValueError`: it cannot be."""
    if not setting(cfg.model, "moe_lighthouse"):
        check_alone(setting(cfg.model, "moe_replica", 0) or 0)
        return False
    common, rates = cfg.common, cfg.lr_scheduler
    for what, remedy, ok in (
            ("a model without experts", "give --moe-freq and --moe-expert-count", has_experts),
            ("--fp16, --bf16 and --amp", "leave them out",
             not (common.fp16 or common.bf16 or common.amp)),
            ("--zero-sharding os and --ddp-backend fully_sharded", "leave them out",
             not shards_optimizer_state(cfg)),
            ("--store-ema", "leave it out", not cfg.ema.store_ema),
            ("rates by epoch (several --lr, --force-anneal, or --lr-scheduler "
             f"{', '.join(_OWN_RATES)})", "use one --lr and a schedule by updates",
             setting(rates, "_name") not in _OWN_RATES and len(cfg.optimization.lr) == 1
             and setting(rates, "force_anneal") is None)):
        if not ok:
            raise ValueError(f"--moe-lighthouse does not fit {what}: {remedy}")
    check_settings(cfg.model.moe_replica)
    return True
