"""Experts in another order over the ranks, in a checkpoint; `resize` has it for a run.

`order[p]` is the expert that goes to position p. Its weights, what the optimizer keeps for them and
its rows of the router's tensors go there together, so that the model computes the same: only homes
change. (Sums over experts have another order, and of equal scores the lower position wins.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from moe_plugin.checkpoint.reshard import COLUMNS
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Derived, Source, View
from moe_plugin.planner.order_files import check_order, match_layers

Orders = Mapping[str, Sequence[int]]  # by name or prefix of an MoE layer
_CUSTOM = re.compile(r"local_experts\.(\d+)\.(.+)")
_LETTERS = re.compile(r"_([A-Z0-9]+)$")  # of our tensors' names: their axes
_NATIVE = ("weight", "bias", "expert_bias")  # Megatron's router: experts on axis 0
_FIRST = "write the checkpoint in another format first, such as plain"
REPLICAS = "replicas"  # of a layer's extra state, by expert: placed again


def router_axis(name: str, shape: Sequence[int], experts: int) -> int | None:
    """Axis of a router's tensor that counts experts; None: none does.

    Raises:
        ValueError: its values are experts, or it does not say.
    """
    last, letters = name.rpartition(".")[2], _LETTERS.search(name)
    axis = 0 if last in _NATIVE else letters[1].find("E") if letters else -1
    known = letters is not None or experts not in shape or last in _NATIVE
    if last == "table_V" or not known or (axis >= 0 and shape[axis] != experts):
        raise ValueError(f"tensor {name!r} of shape {tuple(shape)} of a router cannot follow an "
                         f"order of {experts} experts: keep the order, or use a router with "
                         "weight_ED")
    return axis if axis >= 0 else None


def reordered(source: Source, orders: Orders) -> Source:
    """The source with its experts in another order.

    orders: by layers' names in a run's records (`planner.order_files.match_layers`).
    Raises:
        CheckpointError: layers or experts are others, or a tensor cannot follow.
    """
    if not source.layers:
        raise CheckpointError(f"the {source.format} checkpoint names no MoE layers: {_FIRST}")
    try:
        by_prefix = {prefix: orders[name] for prefix, name in match_layers(
            orders, list(source.layers), "the order").items()}
        for prefix, order in by_prefix.items():
            check_order(prefix, order, source.layers[prefix]["num_experts"])
        made = [_in_order(source.tensor(key), by_prefix) for key in source.entries]
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    columns = {field: {name: _without_replicas(name, value, by_prefix)
                       for name, value in column.items()}
               for field, column in source.values.get(COLUMNS, {}).items()}
    values = {**source.values, COLUMNS: columns} if columns else source.values
    return View(source, made, values=values)


def _without_replicas(name: str, value: Any, orders: Orders) -> Any:
    ours = any(name == f"{prefix}_extra_state" for prefix in orders)
    return {k: v for k, v in value.items() if k != REPLICAS} if ours else value


def _in_order(one: Derived, orders: Orders) -> Derived:
    field, name = one.key
    prefix = next((prefix for prefix in orders if name.startswith(prefix)), None)
    if prefix is None:
        return one
    order, (part, _, below) = orders[prefix], name.removeprefix(prefix).partition(".")
    if part == "experts":
        custom = _CUSTOM.fullmatch(below)
        if custom is not None:
            position = list(order).index(int(custom[1]))
            return one.renamed(f"{prefix}experts.local_experts.{position}.{custom[2]}")
        if not one.entry.shape:
            return one
        if below[:1].isdecimal():
            raise ValueError(f"tensor {name!r} is of one expert: {_FIRST}")
        axis: int | None = 0
    elif part == "router":
        axis = router_axis(below, one.entry.shape, len(order)) if one.entry.shape else None
    elif field == MODEL and len(order) in one.entry.shape and not part.startswith("shared"):
        raise ValueError(f"tensor {name!r} of shape {one.entry.shape} may be by expert: {_FIRST}")
    else:
        axis = None
    return one if axis is None else _picked(one, axis, order)


def _picked(one: Derived, axis: int, order: Sequence[int]) -> Derived:
    """The tensor with slices `order` of an axis."""
    if one.entry.shape[axis] != len(order):
        raise ValueError(f"tensor {one.key[1]!r} of shape {one.entry.shape} has other experts than "
                         f"an order of {len(order)}")

    def read(window: tuple[slice, ...]) -> Tensor:
        at, after = window[:axis], window[axis + 1:]
        parts = [one.read((*at, slice(first, last), *after))
                 for first, last in _runs(order[window[axis]])]
        return torch.cat(parts, axis) if parts else one.read(window)

    return Derived(one.key, one.entry, read)


def _runs(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive experts, in their order."""
    for _, run in groupby(enumerate(order), key=lambda at: at[1] - at[0]):
        experts = [expert for _, expert in run]
        yield experts[0], experts[-1] + 1
