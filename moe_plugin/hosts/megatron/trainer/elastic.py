"""A Megatron run as one replica of several that come and go (`--moe-lighthouse`)."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_plugin.hosts.megatron.compat import optimizer as optimizers
from moe_plugin.hosts.megatron.groups import timeout_of
from moe_plugin.hosts.megatron.trainer.arguments import our_settings
from moe_plugin.hosts.megatron.trainer.checkpoint import Progress
from moe_plugin.hosts.megatron.trainer.model import Training
from moe_plugin.resilience.elastic import ElasticReplica, ModuleState

logger = logging.getLogger(__name__)


class ElasticSteps:
    """Steps with gradients that are averaged over the replicas that live.

    Args:
        args: of the script, checked.
        training: model and optimizer, in fp32.
        progress: of this replica's own checkpoint.

    Attributes: `progress`: of the steps made so far. `lost`: whether the last one was, because a
        replica was lost. `replica`: what is known of the replicas.
    """

    def __init__(self, args: argparse.Namespace, training: Training, progress: Progress) -> None:
        self._training, self.progress, self.lost = training, progress, False
        self._samples, self._modules = args.global_batch_size, ModuleState(training.bare())
        self.replica = ElasticReplica(args.moe_lighthouse, args.moe_replica, self._state,
                                      self._load, timeout_of(our_settings(args)),
                                      progress=progress.iteration)

    def average(self, gradients: Sequence[Tensor], bad: bool) -> bool:
        """Average the gradients; False: a replica was lost. Collective. bad: all replicas must skip
        this step.
        """
        if bad:
            gradients[0].fill_(float("nan"))
        self.lost = not self.replica.average([*gradients, *self._modules.counts()])
        if self.lost:
            logger.warning("a replica was lost: this step is made again")
        return not self.lost

    def after_step(self) -> tuple[Progress, bool]:
        """How far training is, and whether the next samples are those that follow the last ones."""
        if self.lost:
            return self.progress, False
        self.progress = Progress(self.progress.iteration + 1,
                                  self.progress.consumed_samples + self._samples)
        return self.progress, not self.replica.healed

    def _optimizers(self) -> list[Any]:
        # a rank without parameters of a kind has no optimizer for them
        return [part.optimizer for part in optimizers.parts(self._training.optimizer)
                if part.optimizer is not None]

    def _state(self) -> dict[str, Any]:
        return {"modules": self._modules(),
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers()],
                "progress": (self.progress.iteration, self.progress.consumed_samples)}

    def _load(self, given: dict[str, Any]) -> None:
        self._modules.load(given["modules"])
        for optimizer, state in zip(self._optimizers(), given["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.progress = Progress(*given["progress"])
