"""Which tensors of a model stay in float32 when the data type of the model changes.

* By their name: biases that move by 0.001 and statistics that add up, which 16 bits would stop.
* By what their layer says (`FLOAT32` of `Source.layers`, beginnings of names below it): what a
  module keeps when its model is cast, such as a router under `router.fp32`.
* Routers that are stored in more bits than the experts of their layer: somebody kept them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from moe_plugin.checkpoint.source import MODEL, Derived, Key, TensorEntry
from moe_plugin.routing.contract import FLOAT32

# last part of the name: the bias of `sigmoid_bias`; of Megatron and neutral; of Hugging Face; the
# quantiles of Megatron's quantile_balancing; running statistics of normalization
_NAMES = frozenset(("bias_E", "expert_bias", "e_score_correction_bias", "qb_beta", "running_mean",
                    "running_var"))
_ROUTERS = ("router.", "gate.", "gates.")

Layers = Mapping[str, Mapping[str, Any]]


def marked(derived: Iterable[Derived], layers: Layers) -> list[Derived]:
    """The tensors, with `TensorEntry.keeps_float32` where it holds."""
    tensors = list(derived)
    widest = _bytes_of_experts(tensors, layers)
    return [replace(one, entry=replace(one.entry, keeps_float32=True))
            if _stays(one.key, one.entry, layers, widest) else one for one in tensors]


def _stays(key: Key, entry: TensorEntry, layers: Layers, widest: Mapping[str, int]) -> bool:
    field, name = key
    if field != MODEL or not entry.dtype.is_floating_point:
        return False
    if name.rpartition(".")[2] in _NAMES:
        return True
    for part in _ROUTERS:
        layer, found, _ = name.partition(part)
        if found and layer in layers:
            kept = tuple(layers[layer].get(FLOAT32, ()))
            wider = entry.dtype.itemsize >= torch.float32.itemsize > widest.get(layer, 4)
            return wider or name.removeprefix(layer).startswith(kept)
    return False


def _bytes_of_experts(tensors: Iterable[Derived], layers: Layers) -> dict[str, int]:
    """Bytes of the widest number of each layer's experts."""
    found: dict[str, int] = {}
    for one in tensors:
        (field, name), dtype = one.key, one.entry.dtype
        layer, experts, _ = name.partition("experts.")
        if experts and field == MODEL and layer in layers and dtype.is_floating_point:
            found[layer] = max(found.get(layer, 0), dtype.itemsize)
    return found
