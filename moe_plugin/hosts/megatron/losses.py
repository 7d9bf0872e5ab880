"""Balance losses of a layer in Megatron's gradients and log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.settings import script_arguments, setting
from moe_plugin.hosts.megatron.translate import LOSS_NAMES
from moe_plugin.routing.replay import replaying


# Which layer of its model an MoE layer is; those of multi-token prediction come after all others.
def in_model(layer_number: int | None, config: Any, is_mtp: bool,
             prediction: int | None = None) -> int | None:
    """1-based number among all transformer layers, as in Megatron's log of auxiliary losses.

    Args:
        layer_number: Megatron's.
        is_mtp, prediction: see `compat.sequence_parts`, which says how versions number.
    """
    if layer_number is None or not is_mtp:
        return layer_number
    return layer_number + config.num_layers + (prediction or 0) * _layers_a_prediction(config)


def trace_key(number: int, config: Any,
              prediction: int | None) -> tuple[str, int | None, int]:
    """Block, depth of multi-token prediction and layer of layer `number` (see `in_model`), from 0,
    as in Megatron's routing traces.
    """
    place = number - 1 - config.num_layers
    if place < 0:
        return "decoder", None, number - 1
    if prediction is None:
        return "mtp", place, 0
    return "mtp", prediction, place - prediction * _layers_a_prediction(config)


def moe_layers_before(config: Any, number: int) -> int | None:
    """MoE layers ahead of layer `number` (see `in_model`) on all pipeline stages; None: the pattern
    of this hybrid model is not known.
    """
    pattern = _pattern(config)
    if pattern is None:
        return None
    return sum(pattern[: number - 1]) + max(0, number - 1 - len(pattern))


def last_layer_is_moe(config: Any) -> bool:
    """True where the last layer, which those of multi-token prediction are like, is an MoE layer,
    as far as is known.
    """
    pattern = _pattern(config)
    return pattern is None or bool(pattern[config.num_layers - 1])


def passes_a_microbatch(config: Any, is_mtp: bool) -> int:
    """Forward passes of a layer per micro-batch: `mtp_num_layers` for multi-token prediction with
    one repeated layer (`mtp_use_repeated_layer`).
    """
    repeated = is_mtp and setting(config, "mtp_use_repeated_layer", False)
    return config.mtp_num_layers if repeated else 1


def _layers_a_prediction(config: Any) -> int:
    return len(_hybrid_parts()[1]) or int(config.num_layers)


def _hybrid_parts() -> tuple[str, str, int]:
    """(symbols of the layers, of those of a prediction, number of predictions) of the hybrid model
    that Megatron's script trains; empty for another one.
    """
    main, *predictions = (script_arguments().get("hybrid_layer_pattern") or "").split("/")
    return main.replace("|", ""), predictions[0] if predictions else "", len(predictions)


def _pattern(config: Any) -> list[int] | None:
    main, prediction, count = _hybrid_parts()
    if main:
        return [int(symbol == "E") for symbol in main + prediction * count]
    if setting(config, "is_hybrid_model", False):
        return None  # its pattern is an argument of the model alone
    # an integer: layers 1, 1 + n, 1 + 2n ...; a list: one entry per layer
    pattern = config.moe_layer_freq
    if isinstance(pattern, (list, tuple)):
        return list(pattern)
    return [int(i % pattern == 0) for i in range(config.num_layers)]


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
