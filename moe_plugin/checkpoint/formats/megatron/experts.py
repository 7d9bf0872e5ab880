"""Megatron's own experts and ours: the same numbers under other names and in another order.

    Megatron's own, all experts on axis 0            ours
    mlp.experts.experts.linear_fc1.weight  [E, F, D]      mlp.experts.w_in_LDF   [E, D, F]
        gated: [E, 2F, D], the gate first                 mlp.experts.w_gate_LDF [E, D, F]
    mlp.experts.experts.linear_fc2.weight  [E, D, F]      mlp.experts.w_out_LFD  [E, F, D]
    mlp.experts.experts.linear_fc1.bias    [E, F or 2F]   mlp.experts.b_in_LF, b_gate_LF
    mlp.experts.experts.linear_fc2.bias    [E, D]         mlp.experts.b_out_LD

Megatron's SequentialMLP, GroupedMLP (weight1, weight2) and TEGroupedMLP all have these names in a
distributed checkpoint. Router, expert bias, shared experts and everything else are called alike.
Optimizer state follows its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moe_plugin.checkpoint.formats.megatron.folders import NATIVE, OURS
from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    Key,
    Source,
    View,
    derive,
    joined,
    pieces_of,
    transposed,
)

_FC1, _FC2 = "experts.experts.linear_fc1", "experts.experts.linear_fc2"
# ours, Megatron's, whether axes are swapped
_PAIRS = (("w_in_LDF", "w_gate_LDF", f"{_FC1}.weight", True),
          ("b_in_LF", "b_gate_LF", f"{_FC1}.bias", False),
          ("w_out_LFD", None, f"{_FC2}.weight", True), ("b_out_LD", None, f"{_FC2}.bias", False))
_SWAP = (0, 2, 1)


def to_native(source: Source) -> Source:
    """A view of a `megatron` source with Megatron's own experts.

    Raises:
        CheckpointError: an expert's tensor has no counterpart; by name.
    """
    derived, used = [], set()
    for field, prefix in _experts(source):
        for first, gate, theirs, swap in _PAIRS:
            ours = [f"{prefix}experts.{name}" for name in (gate, first) if name]
            keys = [(field, name) for name in ours if (field, name) in source.entries]
            if not keys:
                continue
            parts = [transposed(one, _SWAP) if swap else one
                     for one in (derive(source, key) for key in keys)]
            derived.append(joined(parts, 1).renamed(prefix + theirs))
            used.update(keys)
    return _with_rest(source, derived, used, NATIVE)


def to_ours(source: Source) -> Source:
    """A view of a `megatron_native` source with our experts.

    Raises:
        CheckpointError: an expert's tensor has no counterpart; by name.
    """
    derived, used = [], set()
    for field, prefix in _experts(source):
        gated = _gated(source, prefix)
        for first, gate, theirs, swap in _PAIRS:
            key = (field, prefix + theirs)
            if key not in source.entries:
                continue
            one = derive(source, key)
            ours = [gate, first] if gated and gate else [first]
            for name, part in zip(ours, pieces_of(one, len(ours), 1), strict=True):
                part = transposed(part, _SWAP) if swap else part
                derived.append(part.renamed(f"{prefix}experts.{name}"))
            used.add(key)
    return _with_rest(source, derived, used, OURS)


def _experts(source: Source) -> Iterator[tuple[str, str]]:
    """Field and prefix of every MoE layer."""
    for field in dict.fromkeys(field for field, _ in source.entries):
        for prefix in source.layers:
            yield field, prefix


def _gated(source: Source, prefix: str) -> bool:
    """Whether the first map holds gates: it is then twice as wide as the second is long."""
    first, second = (source.entries.get((MODEL, f"{prefix}{name}.weight")) for name in (_FC1, _FC2))
    if first is None or second is None:
        raise CheckpointError(f"layer {prefix!r} has no {_FC1}.weight and {_FC2}.weight: its "
                              "experts are of another kind, which does not convert")
    return first.shape[1] == 2 * second.shape[2]


def _with_rest(source: Source, derived: list[Derived], used: set[Key], format: str) -> Source:
    for key in source.entries:
        if key in used:
            continue
        if any(key[1].startswith(prefix + "experts.") for prefix in source.layers):
            raise CheckpointError(
                f"{key[1]!r} has no counterpart in format {format!r}: only experts of two linear "
                "maps, gated or not, convert; continue with the format that it is in")
        derived.append(derive(source, key))
    return View(source, derived, format=format, values=_values(source.values, format))


def _values(values: Mapping[str, Any], format: str) -> Mapping[str, Any]:
    kept = values.get("megatron")
    if not kept:
        return values
    # what a tuner has learned is of our layers
    objects = {name: value for name, value in kept["objects"].items()
               if ".mlp.tuner/" not in name} if format == NATIVE else kept["objects"]
    return {**values, "megatron": {**kept, "objects": objects}}
