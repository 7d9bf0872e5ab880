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


def mark_float32(entries: Mapping[Key, TensorEntry], layers: Layers) -> dict[Key, TensorEntry]:
    """The entries, with `TensorEntry.keeps_float32` where it holds."""
    widest = _bytes_of_experts(entries, layers)
    return {key: replace(entry, keeps_float32=True) if _stays(key, entry, layers, widest) else entry
            for key, entry in entries.items()}


def marked(derived: Iterable[Derived], layers: Layers) -> list[Derived]:
    """The same of tensors that are not read yet."""
    tensors = list(derived)
    entries = mark_float32({one.key: one.entry for one in tensors}, layers)
    return [replace(one, entry=entries[one.key]) for one in tensors]


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


def _bytes_of_experts(entries: Mapping[Key, TensorEntry], layers: Layers) -> dict[str, int]:
    """Bytes of the widest number of each layer's experts."""
    found: dict[str, int] = {}
    for (field, name), entry in entries.items():
        layer, experts, _ = name.partition("experts.")
        if experts and field == MODEL and layer in layers and entry.dtype.is_floating_point:
            found[layer] = max(found.get(layer, 0), entry.dtype.itemsize)
    return found
