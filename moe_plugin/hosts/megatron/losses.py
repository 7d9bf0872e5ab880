"""Add a layer's balance losses to Megatron's gradients and log, and count MoE layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.hosts.megatron.compat import aux_losses, core
from moe_plugin.hosts.megatron.compat.settings import script_arguments, setting
from moe_plugin.hosts.megatron.translate import LOSS_NAMES
from moe_plugin.routing.replay import replaying


# Layers of multi-token prediction are numbered after all other layers.
def in_model(layer_number: int | None, config: Any, is_mtp: bool,
             prediction: int | None = None) -> int | None:
    """Return the 1-based index of a layer among all transformer layers of the model, as used in
    Megatron's log of auxiliary losses.

    Args:
        layer_number: number that Megatron assigned to the layer.
        config: `TransformerConfig`.
        is_mtp: True if the layer belongs to multi-token prediction.
        prediction: index of the multi-token prediction that contains the layer.
            `compat.sequence_parts` describes how different Megatron versions number these layers.
    """
    if layer_number is None or not is_mtp:
        return layer_number
    return layer_number + config.num_layers + (prediction or 0) * _layers_a_prediction(config)


def trace_key(number: int, config: Any,
              prediction: int | None) -> tuple[str, int | None, int]:
    """Return the block, the depth of multi-token prediction and the layer, in the format of
    Megatron's routing traces. The depth and the layer are 0-based.

    number: 1-based number of the layer, as returned by `in_model`.
    """
    mtp_index = number - 1 - config.num_layers
    if mtp_index < 0:
        return "decoder", None, number - 1
    if prediction is None:
        return "mtp", mtp_index, 0
    return "mtp", prediction, mtp_index - prediction * _layers_a_prediction(config)


def moe_layers_before(config: Any, number: int) -> int | None:
    """Count the MoE layers before layer `number` in the model, on all pipeline stages. See
    `in_model`.

    Return None if the model is a hybrid model whose layer pattern is unknown.
    """
    pattern = _pattern(config)
    if pattern is None:
        return None
    return sum(pattern[: number - 1]) + max(0, number - 1 - len(pattern))


def last_layer_is_moe(config: Any) -> bool:
    """Return True if the model's last layer is an MoE layer or the layer pattern is unknown.

    Layers of multi-token prediction have the same type as the last layer.
    """
    pattern = _pattern(config)
    return pattern is None or bool(pattern[config.num_layers - 1])


def passes_a_microbatch(config: Any, is_mtp: bool) -> int:
    """Return the number of forward passes that a layer runs per micro-batch.

    If multi-token prediction repeats a single layer (`mtp_use_repeated_layer`), this number is
    `mtp_num_layers`. Otherwise, it is 1.
    """
    repeated = is_mtp and setting(config, "mtp_use_repeated_layer", False)
    return config.mtp_num_layers if repeated else 1


def _layers_a_prediction(config: Any) -> int:
    return len(_hybrid_parts()[1]) or int(config.num_layers)


def _hybrid_parts() -> tuple[str, str, int]:
    """Return three values: the layer symbols of the main model, the layer symbols of one
    multi-token prediction, and the number of predictions.

    The values describe the hybrid model that Megatron's script trains. If the model is not hybrid,
    there are no layer symbols and the number of predictions is 0.
    """
    main, *predictions = (script_arguments().get("hybrid_layer_pattern") or "").split("/")
    return main.replace("|", ""), predictions[0] if predictions else "", len(predictions)


def _pattern(config: Any) -> list[int] | None:
    main, prediction, count = _hybrid_parts()
    if main:
        return [int(symbol == "E") for symbol in main + prediction * count]
    if setting(config, "is_hybrid_model", False):
        return None  # the pattern is an argument of the model, which is not accessible here
    # an integer: layers 1, 1 + n, 1 + 2n ...; a list: one entry per layer
    pattern = config.moe_layer_freq
    if isinstance(pattern, (list, tuple)):
        return list(pattern)
    return [int(i % pattern == 0) for i in range(config.num_layers)]


Count = int | Tensor


@dataclass(frozen=True)
class AuxiliaryLosses:
    """Adds the balance losses of one layer to Megatron's gradients and log.

    Attributes:
        config: `TransformerConfig`.
        weights: dict that maps each loss name of this package to the weight of the loss.
        ranks: process group whose ranks share the tokens of a micro-batch. Each rank computes a
            share of the losses.
        timeout_s: timeout for each collective among these ranks, in seconds.
        passes: number of forward passes per micro-batch. Each loss is divided by the number of
            forward passes. See `passes_a_microbatch`.
    """

    config: Any
    weights: Mapping[str, float]
    ranks: core.Group
    timeout_s: float
    passes: int = 1

    def attach(self, y: Tensor, losses: Mapping[str, Tensor], own_tokens: Count,
               layer_number: int | None) -> Tensor:
        """Return `y` unchanged, and log the losses. In the backward pass, the gradients of the
        losses are added.

        With `calculate_per_token_loss`, Megatron divides the gradients of a step by the number of
        tokens. To compensate for this division, each loss is multiplied by the number of tokens
        that its micro-batch has on all ranks.

        Args:
            y: any activation of the layer.
            losses: dict that maps each loss name of this package to the current rank's share of the
                loss. Each loss is a scalar that has not been multiplied by its weight.
            own_tokens: number of tokens on the current rank, excluding padding.
            layer_number: see `in_model`.
        """
        chosen = {name: weight for name, weight in self.weights.items()
                  if weight and name in losses}
        if not chosen:
            return y
        scale = self.tokens(own_tokens) if self.config.calculate_per_token_loss else 1
        group = self.ranks if self.ranks.size() > 1 else None
        for name, weight in chosen.items():
            loss = losses[name] / self.passes
            # as in Megatron, the z loss of a repeated layer is divided only in the log
            counted = losses[name] if name == "z" else loss
            y = aux_losses.attach_loss(y, weight * counted * scale)
            if not replaying():
                aux_losses.log_loss(LOSS_NAMES.get(name, f"{name}_loss"), loss, layer_number,
                              self.config, group)
        return y

    def tokens(self, rank_tokens: Count) -> Count:
        """Return the number of tokens in the micro-batch, summed over the ranks that share it.

        If `rank_tokens` is a tensor, this is a collective operation, so all of these ranks must
        call this method.
        """
        if isinstance(rank_tokens, int):  # without padding all ranks have the same number
            return rank_tokens * self.ranks.size()
        return comm_of(self.ranks, self.timeout_s).all_reduce(rank_tokens)


def wanted(module: torch.nn.Module) -> bool:
    """Return True if the current pass must add the losses.

    Losses are not added during evaluation. With activation recomputation, losses are not added in
    the first pass, because the first pass computes no gradients.
    """
    return module.training and torch.is_grad_enabled()
