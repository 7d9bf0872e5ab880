"""Convert between the state dicts of several ranks and one full state dict.

The state dict of a rank contains only those experts that this rank stores. A *full* state dict
contains all experts, like the state dict of a single rank. The first axis of an expert tensor
therefore has the size E. `merge` and `split` are inverses of each other for every number of ranks
among which the experts can be divided. Both functions also accept lazy tensors (`source.Derived`),
for which they return lazy tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.checkpoint.derived import joined, part_of
from moe_plugin.checkpoint.name_table import marked
from moe_plugin.checkpoint.source import MODEL, Derived, DerivedSource, Source, Window
from moe_plugin.experts.base import with_current_names
from moe_plugin.experts.ffn import PART_AXIS, SHARD_AXIS
from moe_plugin.routed_experts import STATE_VERSION

_CUSTOM = re.compile(r"local_experts\.(\d+)\.(.+)")
State = Mapping[str, Any]
# columns of a single rank: field ("model", "exp_avg", ...) -> name -> tensor on disk (`Derived`) or
# other value
Columns = Mapping[str, Mapping[str, Any]]
COLUMNS = "columns"  # key in `Source.values`: the values in columns that are not tensors
GROUPS = "optimizer_groups"  # key in `Source.values`


def moe_layers(state: State) -> dict[str, dict[str, int]]:
    """Return the extra state of every MoE layer in a state dict, keyed by the layer's prefix.

    See `MoELayer.get_extra_state`.
    """
    suffix = "_extra_state"
    layers: Any = {key.removesuffix(suffix): value for key, value in state.items()
                   if key.endswith(suffix) and isinstance(value, Mapping) and "ep_size" in value}
    return layers


def merge(states: Sequence[State],
          layers: Mapping[str, Mapping[str, int]] | None = None) -> dict[str, Any]:
    """Merge the state dicts of all ranks in one expert-parallel group into a full state dict.

    All entries except those of experts are copied from rank 0.

    Args:
        states: one state dict per rank, in rank order. All state dicts must have the same keys.
        layers: extra states of the MoE layers, by the prefix of each layer. Defaults to the extra
            states in rank 0's state dict. Required if the state dicts contain no extra states, as
            is the case for optimizer states.
    Raises:
        ValueError: If the number of state dicts is not the size of the group, or if the state dicts
            are not in rank order.
    """
    layers = moe_layers(states[0]) if layers is None else layers
    for rank, state in enumerate(states):
        for name, origin in moe_layers(state).items():
            if origin["ep_size"] != len(states) or origin["ep_rank"] != rank:
                raise ValueError(
                    f"state {rank} of {len(states)} was saved by rank {origin['ep_rank']} of "
                    f"{origin['ep_size']} for layer {name!r}; pass the states of all ranks of "
                    "the group in rank order")
    whole: dict[str, Any] = {}
    for key, value in states[0].items():
        prefix = _layer_of(key, layers)
        if prefix is None:
            whole[key] = value
        elif key == prefix + "_extra_state":
            whole[key] = {
                **{k: v for k, v in value.items() if k != "shards"}, "ep_rank": 0, "ep_size": 1
            }
        else:
            _merge_key(whole, states, prefix, key, layers[prefix]["num_experts"],
                       layers[prefix].get("shards"))
    return whole


def split(whole: State, rank: int, size: int, layers: Mapping[str, Mapping[str, int]] | None = None,
          shards: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return those entries of a full state dict that one rank of an expert-parallel group stores.

    Args:
        whole: the full state dict.
        rank, size: rank in the expert-parallel group, and number of ranks in this group.
        layers: see `merge`.
        shards: number of ranks among which each expert is split, by layer prefix. Required only for
            layers that set `parallel.shards`. Optional.
    Raises:
        ValueError: If the experts cannot be divided among `size` ranks, or if the rank does not
            exist.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size} ranks does not exist: the rank must be >= 0 and < "
                         f"{size}, and the number of ranks must be >= 1")
    layers = moe_layers(whole) if layers is None else layers
    part: dict[str, Any] = {}
    for key, value in whole.items():
        prefix = _layer_of(key, layers)
        if prefix is None:
            part[key] = value
        elif key == prefix + "_extra_state":
            cut = {} if not shards or prefix not in shards else {"shards": shards[prefix]}
            part[key] = {**value, "ep_rank": rank, "ep_size": size, **cut}
        else:
            experts, cut_over = layers[prefix]["num_experts"], (shards or {}).get(prefix)
            _check_fit(prefix, experts, size, cut_over)
            part.update(_split_key(key, value, prefix, experts, rank, size, cut_over))
    return part


def _layer_of(key: str, layers: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return the prefix of the MoE layer that the entry `key` belongs to, or None."""
    for prefix in layers:
        if key.startswith(prefix) and (key.startswith(prefix + "experts.")
                                       or key == prefix + "_extra_state"):
            return prefix
    return None


def _check_fit(prefix: str, experts: int, size: int, shards: int | None) -> None:
    if shards is not None:
        if size % shards or experts % (size // shards):
            raise ValueError(
                f"layer {prefix!r} has num_experts={experts}, which cannot be divided "
                f"among {size} ranks with shards={shards}: ranks must be a multiple of shards, "
                "and num_experts a multiple of ranks / shards"
            )
    elif experts % size and size % experts:
        raise ValueError(
            f"layer {prefix!r} has num_experts={experts}, which cannot be divided among "
            f"{size} ranks: the number of ranks must be a multiple or a divisor of num_experts"
        )


def _merge_key(whole: dict[str, Any], states: Sequence[State], prefix: str, key: str, experts: int,
               shards: int | None) -> None:
    name = key.removeprefix(prefix + "experts.")
    custom = _CUSTOM.fullmatch(name)
    if custom:
        local = experts // len(states)
        for rank, state in enumerate(states):
            index = rank * local + int(custom[1])
            whole[f"{prefix}experts.local_experts.{index}.{custom[2]}"] = state[key]
        return
    pieces = [state[key] for state in states]
    if not _shape(pieces[0]):
        whole[key] = pieces[0]
        return
    shards = shards or max(1, len(states) // experts)
    if shards > 1:  # consecutive ranks store the shards of the same experts
        axis = _axis(key, name)
        pieces = pieces[::shards] if axis is None else [
            _join(pieces[first:first + shards], axis)
            for first in range(0, len(states), shards)
        ]
    whole[key] = _join(pieces, 0)


def _split_key(key: str, value: Any, prefix: str, experts: int, rank: int, size: int,
               shards: int | None) -> dict[str, Any]:
    name = key.removeprefix(prefix + "experts.")
    custom = _CUSTOM.fullmatch(name)
    if custom:
        owner, local = divmod(int(custom[1]), max(1, experts // size))
        return {f"{prefix}experts.local_experts.{local}.{custom[2]}": value
                } if owner == rank else {}
    shape = _shape(value)
    if not shape:
        return {key: value}
    shards = shards or max(1, size // experts)
    axis = _axis(key, name) if shards > 1 else 0
    if shards > 1 and axis is not None and shape[axis] % shards:
        raise ValueError(f"{key!r} of shape {shape} cannot be split into {shards} shards: the size "
                         f"of axis {axis} must be a multiple of the number of shards; choose "
                         "another number of ranks")
    window = window_of_rank(shape, rank, experts * shards // size, shards, axis)
    if isinstance(value, Derived):
        return {key: value if rank == 0 and size == 1 else part_of(value, window)}
    return {key: value[window]}


def window_of_rank(shape: Sequence[int], rank: int, local: int, shards: int,
                   axis: int | None) -> Window:
    """Return the part of an expert tensor that one rank of an expert-parallel group stores, as a
    window.

    Args:
        shape: shape of the tensor with all experts.
        rank: rank in the expert-parallel group.
        local: number of experts that a rank stores, either as a whole or as shards.
        shards: number of consecutive ranks that store shards of the same experts.
        axis: axis along which experts are split into shards, or None if every shard needs the whole
            tensor.
    """
    run, shard = divmod(rank, shards)
    window = [slice(0, size) for size in shape]
    window[0] = slice(run * local, (run + 1) * local)
    if shards > 1 and axis is not None:
        width = shape[axis] // shards
        window[axis] = slice(shard * width, (shard + 1) * width)
    return tuple(window)


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a value, which is empty for objects without axes."""
    if isinstance(value, Derived):
        return value.entry.shape
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _join(pieces: Sequence[Any], axis: int) -> Any:
    if isinstance(pieces[0], Derived):
        return pieces[0] if len(pieces) == 1 else joined(pieces, axis)
    return torch.cat(list(pieces), axis)


def _axis(key: str, name: str) -> int | None:
    if name not in PART_AXIS:
        raise ValueError(
            f"{key!r} is not a parameter that can be split into shards; only these can: "
            f"{', '.join(SHARD_AXIS)}; use at most as many ranks as experts")
    return PART_AXIS[name]


def column_source(format: str, columns: Columns, layers: Mapping[str, Mapping[str, int]],
                  values: Mapping[str, Any], description: Mapping[str, Any],
                  paths: Sequence[Path]) -> DerivedSource:
    """Build a source from columns. A column contains the values of one field, keyed by name. Values
    that are not tensors are stored in `values[COLUMNS]`.

    Args:
        format, layers, values: attributes of the new source, as described in `Source`.
        columns: for each field, a dict of values by name. The values are tensors on disk that
            contain all experts, or other objects.
        description, paths: return values of `Source.describe` and `Source.files` for the new
            source.
    """
    rest = {field: {name: value for name, value in column.items()
                    if not isinstance(value, Derived)} for field, column in columns.items()}
    return DerivedSource(
        marked((replace(value, key=(field, name)) for field, column in columns.items()
                for name, value in column.items() if isinstance(value, Derived)), layers),
        format, {**values, COLUMNS: rest}, layers, description, paths)


def ranked_source(format: str, ranks: Sequence[Columns], values: Mapping[str, Any],
                  description: Mapping[str, Any], paths: Sequence[Path]) -> DerivedSource:
    """Build a source with the experts of all ranks from the columns that each rank of one
    expert-parallel group stores.

    Args:
        format, values: attributes of the new source, as described in `Source`.
        ranks: columns of each rank, in rank order.
        description, paths: return values of `Source.describe` and `Source.files` for the new
            source.
    """
    ranks = [{field: with_current_names(column) for field, column in rank.items()}
             for rank in ranks]
    layers = moe_layers(ranks[0][MODEL])
    whole = {field: merge([rank.get(field, {}) for rank in ranks], layers) for field in ranks[0]}
    return column_source(format, whole, moe_layers(whole[MODEL]), values, description, paths)


def columns_of(source: Source) -> dict[str, dict[str, Any]]:
    """Return all tensors and other values of a source as columns, that is, as one dict of values by
    name for each field.
    """
    whole: dict[str, dict[str, Any]] = {MODEL: {}}
    for field, name in source.entries:
        whole.setdefault(field, {})[name] = source.tensor((field, name))
    for field, column in source.values.get(COLUMNS, {}).items():
        whole.setdefault(field, {}).update(column)
    return whole


def columns_of_rank(source: Source, rank: int, size: int,
                    shards: int | Mapping[str, int] | None = None) -> dict[str, dict[str, Any]]:
    """Return the columns that one rank of an expert-parallel group stores.

    Args:
        source: the source.
        rank, size: rank in the expert-parallel group, and number of ranks in this group.
        shards: number of ranks among which each expert is split, either one number for all layers
            or a mapping by layer prefix. Optional.
    """
    if isinstance(shards, int):
        shards = dict.fromkeys(source.layers, shards)
    whole = columns_of(source)
    # for formats that do not store the layers' extra state
    for prefix, origin in source.layers.items():
        whole[MODEL].setdefault(prefix + "_extra_state", {
            "version": STATE_VERSION, "num_experts": origin["num_experts"], "ep_size": 1,
            "ep_rank": 0})
    return {field: split(column, rank, size, source.layers, shards)
            for field, column in whole.items()}


def sizes_of(layers: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the expert-parallel size and the number of shards that the layers were saved with."""
    sizes = {}
    for name, key in (("ep", "ep_size"), ("shards", "shards")):
        given = sorted({origin[key] for origin in layers.values() if key in origin})
        if given:
            sizes[name] = given[0] if len(given) == 1 else given
    return sizes


def bytes_of_ranks(source: Source, world: int, ep: int) -> int:
    """Return the total size in bytes of the tensors that `world` ranks write together. Each rank
    writes the experts that it stores, and all tensors that do not belong to experts.
    """
    ahead, total = tuple(prefix + "experts." for prefix in source.layers), 0
    for (_, name), entry in source.entries.items():
        total += entry.nbytes * (world // ep if ahead and name.startswith(ahead) else world)
    return total
