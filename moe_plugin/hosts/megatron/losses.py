"""Balance losses of a layer in Megatron's gradients and log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.translate import LOSS_NAMES
from moe_plugin.routing.replay import replaying

Count = int | Tensor


@dataclass(frozen=True)
class AuxiliaryLosses:
    """How the balance losses of a layer join Megatron's.

    Attributes:
        config: `TransformerConfig`.
        weights: by our names.
        ranks: ranks that share a micro-batch's tokens and have parts of its losses.
        timeout_s: of a collective call among them.
        passes: forward passes per micro-batch that a loss is shared between, see
            `layer_numbers.passes_a_microbatch`.
    """

    config: Any
    weights: Mapping[str, float]
    ranks: core.Group
    timeout_s: float
    passes: int = 1

    def attach(self, y: Tensor, losses: Mapping[str, Tensor], own_tokens: Count,
               layer_number: int | None) -> Tensor:
        """`y`, whose backward pass adds the losses' gradients; logs them.

        Under `calculate_per_token_loss` Megatron divides the gradients of a step by its tokens, so
        that a loss counts once for every token of its micro-batch, on whichever ranks they are.

        Args:
            y: any activation of the layer.
            losses: this rank's parts, raw scalars by our names.
            own_tokens: this rank's, without padding.
            layer_number: see `layer_numbers.in_model`.
        """
        chosen = {name: weight for name, weight in self.weights.items()
                  if weight and name in losses}
        if not chosen:
            return y
        scale = self.tokens(own_tokens) if self.config.calculate_per_token_loss else 1
        group = self.ranks if self.ranks.size() > 1 else None
        for name, weight in chosen.items():
            loss = losses[name] / self.passes
            # as Megatron: the z loss of a repeated layer is divided in the log alone
            counted = losses[name] if name == "z" else loss
            y = core.attach_loss(y, weight * counted * scale)
            if not replaying():
                core.log_loss(LOSS_NAMES.get(name, f"{name}_loss"), loss, layer_number,
                              self.config, group)
        return y

    def tokens(self, own: Count) -> Count:
        """Tokens of the micro-batch on all ranks that share it; a collective call for a tensor."""
        if isinstance(own, int):  # no padding: as many on each
            return own * self.ranks.size()
        return comm_of(self.ranks, self.timeout_s).all_reduce(own)


def wanted(module: torch.nn.Module) -> bool:
    """Whether a pass adds losses: not in evaluation, and not in the first pass of a recomputation,
    which has no gradients.
    """
    return module.training and torch.is_grad_enabled()
