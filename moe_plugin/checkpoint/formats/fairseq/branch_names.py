"""Tensors of fairseq's `moe` branch as those of our models, and back.

    PREFIX is decoder.layers.N. or encoder.layers.N.; expert i of E, D width, F inner width
    branch                                          ours
    PREFIXmoe_layer.gate.wg.weight         [E, D]   PREFIXmoe_layer.moe.router.weight_ED
    PREFIXmoe_layer.experts.i.fc1.weight   [F, D]   PREFIXmoe_layer.moe.experts.w_in_LDF  [E, D, F]
    PREFIXmoe_layer.experts.i.fc1.bias     [F]      PREFIXmoe_layer.moe.experts.b_in_LF   [E, F]
    PREFIXmoe_layer.experts.i.fc2.weight   [D, F]   PREFIXmoe_layer.moe.experts.w_out_LFD [E, F, D]
    PREFIXmoe_layer.experts.i.fc2.bias     [D]      PREFIXmoe_layer.moe.experts.b_out_LD  [E, D]

All other names are the same. Optimizers know parameters by their number in the model: the branch
registers an MoE layer ahead of its transformer layer's `final_layer_norm`, our models behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_plugin.checkpoint.ranks import COLUMNS
from moe_plugin.checkpoint.source import (
    CheckpointError,
    Derived,
    Source,
    View,
    item_of,
    stacked,
    transposed,
)

# the branch's name in an expert -> ours; both orders are those in which parameters are registered
EXPERT = {"fc1.weight": "w_in_LDF", "fc1.bias": "b_in_LF", "fc2.weight": "w_out_LFD",
          "fc2.bias": "b_out_LD"}
_OURS = ("w_in_LDF", "w_out_LFD", "b_in_LF", "b_out_LD")
_BRANCH_EXPERT = re.compile(r"(.+\.moe_layer\.)experts\.(\d+)\.(.+)")
_OUR_EXPERT = re.compile(r"(.+\.moe_layer\.)moe\.experts\.(.+)")
_GATE, _ROUTER = "moe_layer.gate.wg.weight", "moe_layer.moe.router.weight_ED"
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


def our_name(name: str) -> str:
    """Our name of a branch's parameter; of an expert's: of the tensor of all experts."""
    expert = expert_of(name)
    if expert is None:
        return name.removesuffix(_GATE) + _ROUTER if name.endswith(_GATE) else name
    return f"{expert[0]}moe.experts.{EXPERT[expert[2]]}"


def our_layers(layers: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Layers of the branch by our prefixes."""
    return {prefix + "moe.": origin for prefix, origin in layers.items()}


def to_ours(source: Source) -> View:
    """A view of a source with the branch's names that has ours.

    Raises:
        CheckpointError: see `expert_of`; experts are missing.
    """
    groups: dict[tuple[str, str], dict[int, Derived]] = {}
    derived = []
    for field, name in source.entries:
        expert = expert_of(name)
        if expert is None:
            derived.append(source.tensor((field, name)).renamed(our_name(name)))
        else:
            groups.setdefault((field, our_name(name)), {})[expert[1]] = source.tensor((field, name))
    for (field, name), experts in groups.items():
        count = source.layers[_prefix_of(name)]["num_experts"]
        missing = sorted(set(range(count)) - set(experts))
        if missing:
            raise CheckpointError(f"expert {missing[0]} of {count} has no {name!r} in {field!r}: a "
                                  "file of the branch's checkpoint is missing or of another one")
        derived.append(_all_experts([experts[index] for index in range(count)]).renamed(name))
    columns = source.values.get(COLUMNS, {})
    return View(source, derived, format="fairseq", layers=our_layers(source.layers), values={
        **source.values, COLUMNS: {field: {our_name(name): value for name, value in column.items()}
                                   for field, column in columns.items()}})


def _prefix_of(name: str) -> str:
    found = _OUR_EXPERT.fullmatch(name)
    assert found is not None
    return found[1]


def _all_experts(each: Sequence[Derived]) -> Derived:
    whole = stacked(each)
    return transposed(whole, (0, 2, 1)) if len(whole.entry.shape) == 3 else whole


def to_branch(source: Source) -> View:
    """A view of a source of our fairseq models with the branch's names.

    Raises:
        CheckpointError: it has a parameter that the branch's layer has not; by name.
    """
    derived: list[Derived] = []
    names = {prefix: prefix.removesuffix("moe.") for prefix in source.layers}
    for field, name in source.entries:
        one = source.tensor((field, name))
        derived += [one.renamed(other) if index is None else _one_expert(one, index).renamed(other)
                    for other, index in branch_names(name, source.layers)]
    columns = {
        field: {other: value for name, value in column.items() if not name.endswith("_extra_state")
                for other, _ in branch_names(name, source.layers)}
        for field, column in source.values.get(COLUMNS, {}).items()}
    return View(source, derived, format="fairseq_branch",
                layers={names[prefix]: origin for prefix, origin in source.layers.items()},
                values={**source.values, COLUMNS: columns})


def _one_expert(one: Derived, index: int) -> Derived:
    part = item_of(one, index)
    return transposed(part, (1, 0)) if len(part.entry.shape) == 2 else part


def branch_names(name: str,
                 layers: Mapping[str, Mapping[str, int]]) -> list[tuple[str, int | None]]:
    """The branch's names of one of our tensors, each with the expert that it is of; None: all.

    Args:
        layers: see `Source`, of our models.
    """
    prefix = next((prefix for prefix in layers if name.startswith(prefix)), None)
    if prefix is None:
        return [(name, None)]
    if name.endswith(_ROUTER):
        return [(name.removesuffix(_ROUTER) + _GATE, None)]
    found = _OUR_EXPERT.fullmatch(name)
    inner = next((theirs for theirs, ours in EXPERT.items() if found and ours == found[2]), None)
    if inner is None:
        raise CheckpointError(f"the branch's MoE layer has no counterpart of {name!r}; it has a "
                              "gate of one linear map and experts of two layers, with biases")
    return [(f"{prefix.removesuffix('moe.')}experts.{index}.{inner}", index)
            for index in range(layers[prefix]["num_experts"])]


def our_order(names: Iterable[str]) -> list[str]:
    """Our names of the branch's parameters, in the order of our models."""
    return _ordered(dict.fromkeys(map(our_name, names)), _our_place)


def branch_order(names: Iterable[str]) -> list[str]:
    """The branch's parameters, in the order of its models. names: of its own, in any model's."""
    return _ordered(names, _branch_place)


def _ordered(names: Iterable[str], place: Any) -> list[str]:
    """Names of one transformer layer by their place in it; stable, the layers stay where they are.
    """
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
