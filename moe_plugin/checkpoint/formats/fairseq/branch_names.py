"""Conversion between the tensor names of fairseq's `moe` branch and the names of fairseq models
with this package's layers.

    PREFIX is decoder.layers.N. or encoder.layers.N.; expert i of E, D width, F inner width
    branch                                          ours
    PREFIXmoe_layer.gate.wg.weight         [E, D]   PREFIXmoe_layer.moe.router.weight_ED
    PREFIXmoe_layer.experts.i.fc1.weight   [F, D]   PREFIXmoe_layer.moe.experts.w_in_LDF  [E, D, F]
    PREFIXmoe_layer.experts.i.fc1.bias     [F]      PREFIXmoe_layer.moe.experts.bias_in_LF   [E, F]
    PREFIXmoe_layer.experts.i.fc2.weight   [D, F]   PREFIXmoe_layer.moe.experts.w_out_LFD [E, F, D]
    PREFIXmoe_layer.experts.i.fc2.bias     [D]      PREFIXmoe_layer.moe.experts.bias_out_LD  [E, D]

All other tensors have the same names in both formats. Optimizers identify each parameter by its
position in the model. In a transformer layer of the branch, the MoE layer comes before
`final_layer_norm`. In models with this package's layers, the MoE layer comes after
`final_layer_norm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from moe_plugin.checkpoint.name_table import NameRule, NameTable
from moe_plugin.checkpoint.reshard import COLUMNS
from moe_plugin.checkpoint.source import CheckpointError, Derived, Source, View

# the branch's name in an expert -> our name; both orders are the orders of parameter registration
EXPERT = {"fc1.weight": "w_in_LDF", "fc1.bias": "bias_in_LF", "fc2.weight": "w_out_LFD",
          "fc2.bias": "bias_out_LD"}
_OURS = ("w_in_LDF", "w_out_LFD", "bias_in_LF", "bias_out_LD")
_BRANCH_EXPERT = re.compile(r"(.+\.moe_layer\.)experts\.(\d+)\.(.+)")
_OUR_EXPERT = re.compile(r"(.+\.moe_layer\.)moe\.experts\.(.+)")
_LAYER = re.compile(r"((?:en|de)coder\.layers\.\d+\.)(.+)")


def expert_of(name: str) -> tuple[str, int, str] | None:
    """Split the name of an expert's parameter in fairseq's `moe` branch into three parts. If the
    name does not belong to an expert, return None.

    Returns: the prefix (which ends with `moe_layer.`), the index of the expert, and the name of the
        parameter within the expert.

    Raises:
        CheckpointError: If the expert's parameter is not listed in `EXPERT`.
    """
    match = _BRANCH_EXPERT.fullmatch(name)
    if match is None:
        return None
    if match[3] not in EXPERT:
        raise CheckpointError(f"{name!r} is an expert parameter that MoELayer does not have; the "
                              f"parameters of an expert are {', '.join(EXPERT)}")
    return match[1], int(match[2]), match[3]


def renumbered(name: str, index: int) -> str:
    """Replace the expert index in the name of an expert's parameter in fairseq's `moe` branch."""
    match = _BRANCH_EXPERT.fullmatch(name)
    assert match is not None
    return f"{match[1]}experts.{index}.{match[3]}"


def _table(prefixes: Iterable[str]) -> NameTable:
    """Build the name table for MoE layers with these prefixes, which end with `moe_layer.`."""
    rules: list[NameRule] = []
    for prefix in prefixes:
        rules.append(NameRule(f"{prefix}gate.wg.weight", (f"{prefix}moe.router.weight_ED",)))
        rules += [NameRule(f"{prefix}experts.{{e}}.{theirs}", (f"{prefix}moe.experts.{ours}",),
                       swap=theirs.endswith("weight")) for theirs, ours in EXPERT.items()]
    return NameTable(rules)


def to_ours(source: Source) -> View:
    """Return a view that converts the branch's names to those of this package's fairseq models."""
    names, experts = _table(source.layers), _experts(source)
    tensors = names.neutral(map(source.tensor, source.entries), lambda one: one, experts)
    columns = source.values.get(COLUMNS, {})
    return View(
        source, tensors, format="fairseq",
        layers={prefix + "moe.": origin for prefix, origin in source.layers.items()},
        values={**source.values, COLUMNS: {
            field: {names.neutral_name(name): value for name, value in column.items()}
            for field, column in columns.items()}})


def _experts(source: Source) -> int:
    return max(origin["num_experts"] for origin in source.layers.values()) if source.layers else 0


def to_branch(source: Source) -> View:
    """Return a view that converts names of this package's fairseq models to the branch's names."""
    def others(tensor: Derived) -> Derived:
        if tensor.key[1].startswith(tuple(source.layers)):
            raise CheckpointError(
                f"the MoE layer of fairseq's moe branch has no counterpart for {tensor.key[1]!r}; "
                "its gate is a single linear map, and its experts have two layers with biases")
        return tensor

    prefixes = {prefix: prefix.removesuffix("moe.") for prefix in source.layers}
    names, experts = _table(prefixes.values()), _experts(source)
    columns = {
        field: {other: value for name, value in column.items() if not name.endswith("_extra_state")
                for other in names.their_names(name, experts)}
        for field, column in source.values.get(COLUMNS, {}).items()}
    return View(source, names.theirs(source, others), format="fairseq_branch",
                layers={prefixes[prefix]: origin for prefix, origin in source.layers.items()},
                values={**source.values, COLUMNS: columns})


def our_order(source: Source) -> list[str]:
    """Return the parameter names of a branch checkpoint, converted to the names and the order of
    models with this package's layers.
    """
    table = _table(source.layers)
    return _ordered(dict.fromkeys(table.neutral_name(name) for _, name in source.entries),
                    _our_place)


def branch_order(names: Iterable[str]) -> list[str]:
    """Sort the branch's parameter names into the order in which its models register them."""
    return _ordered(names, _branch_place)


def _ordered(names: Iterable[str], place: Any) -> list[str]:
    """Sort the names within each transformer layer without changing the order of the layers."""
    listed = list(names)
    first: dict[str, int] = {}
    for number, name in enumerate(listed):
        first.setdefault(_layer_of(name), number)
    return sorted(listed, key=lambda name: (first[_layer_of(name)], place(name)))


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return name if match is None else match[1]


def _our_place(name: str) -> tuple[int, int]:
    if ".moe_layer." not in name:
        return (0, 0)
    match = _OUR_EXPERT.fullmatch(name)
    return (1, 0) if match is None else (1, 1 + _OURS.index(match[2]))


def _branch_place(name: str) -> tuple[int, int, int]:
    if ".final_layer_norm." in name:
        return (2, 0, 0)
    if ".moe_layer." not in name:
        return (0, 0, 0)
    expert = expert_of(name)
    return (1, 0, 0) if expert is None else (1, 1 + expert[1], list(EXPERT).index(expert[2]))
