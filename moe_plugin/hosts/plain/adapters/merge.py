"""Functions that merge adapters into expert weights and that undo a merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.experts.lora import ADAPTER_AXIS, as_adapters
from moe_plugin.kernels.expert_ffn import LowRank
from moe_plugin.layer import MoELayer, named_layers_in


def adapted_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Return a dict of all layers that have adapters, by name.

    Raises:
        ValueError: If the model has no adapters.
    """
    layers = {name: layer for name, layer in named_layers_in(model).items()
              if isinstance(layer.experts, FFNExperts) and layer.experts.adapters is not None}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no experts with adapters. Call "
                         "add_lora(model) first")
    return layers


def merge_lora(model: nn.Module, keep: bool = False) -> None:
    """Merge the adapters into the experts' weights. This is a collective operation.

    Args:
        model: model whose experts have adapters.
        keep: True to keep the adapters, so that `unmerge_lora` can undo the merge. After the merge,
            the kept adapters have no effect. If False, the adapters are deleted, and the weights
            and biases of the experts become trainable again.
    Raises:
        ValueError: If the model has no adapters, or if the adapters have been merged before.
    """
    for name, layer in adapted_layers(model).items():
        built = layer.experts
        assert isinstance(built, FFNExperts) and built.adapters is not None
        if built.adapters.merged is not None:
            raise ValueError(f"the adapters of layer {name!r} are already merged. Call "
                             "unmerge_lora(model) first")
        with torch.no_grad():
            merged = as_adapters(built.used_adapters())
            for w_LIO, low_LIO, factor_LO in _sums(built, merged):
                w_LIO += low_LIO
                w_LIO *= factor_LO
        built.adapters = replace(built.adapters, merged=merged)
        if not keep:
            built.adapters = None
            for adapter in ADAPTER_AXIS:
                built.register_parameter(adapter, None)
            built.requires_grad_()


def unmerge_lora(model: nn.Module) -> None:
    """Undo `merge_lora(model, keep=True)` up to rounding errors.

    Raises:
        ValueError: If the adapters are not merged.
    """
    for name, layer in adapted_layers(model).items():
        built = layer.experts
        assert isinstance(built, FFNExperts) and built.adapters is not None
        if built.adapters.merged is None:
            raise ValueError(f"the adapters of layer {name!r} are not merged. Call "
                             "merge_lora(model, keep=True) first")
        with torch.no_grad():
            for w_LIO, low_LIO, factor_LO in _sums(built, built.adapters.merged):
                w_LIO /= factor_LO
                w_LIO -= low_LIO
        built.adapters = replace(built.adapters, merged=None)


def _sums(experts: FFNExperts, adapters: Mapping[str, LowRank]
          ) -> Iterator[tuple[Tensor, Tensor, Tensor | float]]:
    """For each weight [L, I, O], yield the weight, the matrix product to add to the weight, and the
    factor by which the sum is multiplied.
    """
    for weight, (a_LIR, b_LRO, factor_LO) in adapters.items():
        weights = experts.weights_of()[weight]
        for number, w_LIO in enumerate(weights):
            b = b_LRO.chunk(len(weights), -1)[number]
            factor = 1.0 if factor_LO is None else (
                factor_LO.chunk(len(weights), -1)[number][:, None])
            yield w_LIO, torch.bmm(a_LIR, b), factor
