"""Tensors of fairseq's `moe` branch as those of our models, and back.

    PREFIX is decoder.layers.N. or encoder.layers.N.; expert i of E, D width, F inner width
    branch                                          ours
    PREFIXmoe_layer.gate.wg.weight         [E, D]   PREFIXmoe_layer.moe.router.weight_ED
    PREFIXmoe_layer.experts.i.fc1.weight   [F, D]   PREFIXmoe_layer.moe.experts.w_in_LDF  [E, D, F]
    PREFIXmoe_layer.experts.i.fc1.bias     [F]      PREFIXmoe_layer.moe.experts.bias_in_LF   [E, F]
    PREFIXmoe_layer.experts.i.fc2.weight   [D, F]   PREFIXmoe_layer.moe.experts.w_out_LFD [E, F, D]
    PREFIXmoe_layer.experts.i.fc2.bias     [D]      PREFIXmoe_layer.moe.experts.bias_out_LD  [E, D]

All other names are the same. Optimizers know parameters by their number in the model: the branch
registers an MoE layer ahead of its transformer layer's `final_layer_norm`, our models behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from moe_plugin.checkpoint.name_table import NameRule, NameTable
from moe_plugin.checkpoint.reshard import COLUMNS
from moe_plugin.checkpoint.source import CheckpointError, Derived, Source, View

# the branch's name in an expert -> ours; both orders are those in which parameters are registered
EXPERT = {"fc1.weight": "w_in_LDF", "fc1.bias": "bias_in_LF", "fc2.weight": "w_out_LFD",
          "fc2.bias": "bias_out_LD"}
_OURS = ("w_in_LDF", "w_out_LFD", "bias_in_LF", "bias_out_LD")
_BRANCH_EXPERT = re.compile(r"(.+\.moe_layer\.)experts\.(\d+)\.(.+)")
_OUR_EXPERT = re.compile(r"(.+\.moe_layer\.)moe\.experts\.(.+)")
_LAYER = re.compile(r"((?:en|de)coder\.layers\.\d+\.)(.+)")


def expert_of(name: str) -> tuple[str, int, str] | None:
    """(prefix with `moe_layer.`, expert, name in it) of a branch's parameter of an expert.

    Raises:
        CheckpointError: it is another parameter than those of `EXPERT`.
    """
    found = _BRANCH_EXPERT.fullmatch(name)
    if found is None:
        return None
    if found[3] not in EXPERT:
        raise CheckpointError(f"{name!r} is a parameter of an expert that our layer does not have; "
                              f"it has {', '.join(EXPERT)}")
    return found[1], int(found[2]), found[3]


def renumbered(name: str, index: int) -> str:
    """A branch's parameter of an expert as that of expert `index`."""
    found = _BRANCH_EXPERT.fullmatch(name)
    assert found is not None
    return f"{found[1]}experts.{index}.{found[3]}"


def _table(prefixes: Iterable[str]) -> NameTable:
    """prefixes: of the branch's MoE layers, ending in `moe_layer.`."""
    rules: list[NameRule] = []
    for prefix in prefixes:
        rules.append(NameRule(f"{prefix}gate.wg.weight", (f"{prefix}moe.router.weight_ED",)))
        rules += [NameRule(f"{prefix}experts.{{e}}.{theirs}", (f"{prefix}moe.experts.{ours}",),
                       swap=theirs.endswith("weight")) for theirs, ours in EXPERT.items()]
    return NameTable(rules)


def to_ours(source: Source) -> View:
    """A view of a source with the branch's names that has ours."""
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
    """A view of a source of our fairseq models with the branch's names."""
    def others(one: Derived) -> Derived:
        if one.key[1].startswith(tuple(source.layers)):
            raise CheckpointError(
                f"the branch's MoE layer has no counterpart of {one.key[1]!r}; it has a gate of "
                "one linear map and experts of two layers, with biases")
        return one

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
    """Our names of the parameters of a source with the branch's, in the order of our models."""
    table = _table(source.layers)
    return _ordered(dict.fromkeys(table.neutral_name(name) for _, name in source.entries),
                    _our_place)


def branch_order(names: Iterable[str]) -> list[str]:
    """The branch's parameters, in the order of its models. names: of its own, in any model's."""
    return _ordered(names, _branch_place)


def _ordered(names: Iterable[str], place: Any) -> list[str]:
    """Names of one transformer layer by their place in it; the layers stay where they are."""
    listed = list(names)
    first: dict[str, int] = {}
    for number, name in enumerate(listed):
        first.setdefault(_layer_of(name), number)
    return sorted(listed, key=lambda name: (first[_layer_of(name)], place(name)))


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return name if found is None else found[1]


def _our_place(name: str) -> tuple[int, int]:
    if ".moe_layer." not in name:
        return (0, 0)
    found = _OUR_EXPERT.fullmatch(name)
    return (1, 0) if found is None else (1, 1 + _OURS.index(found[2]))


def _branch_place(name: str) -> tuple[int, int, int]:
    if ".final_layer_norm." in name:
        return (2, 0, 0)
    if ".moe_layer." not in name:
        return (0, 0, 0)
    expert = expert_of(name)
    return (1, 0, 0) if expert is None else (1, 1 + expert[1], list(EXPERT).index(expert[2]))
