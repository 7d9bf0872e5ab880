"""Checkpoints of which each rank wrote a file: whole tensors from the ranks' files, and the files'
content for any other number of ranks.

The content of one rank is a table of columns: field ("model", "exp_avg", ...) -> name -> tensor on
disk (`Derived`) or any other value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_plugin.checkpoint.precision import marked
from moe_plugin.checkpoint.reshard import merge, moe_layers, split
from moe_plugin.checkpoint.source import MODEL, Derived, DerivedSource, Source
from moe_plugin.tuning.layout_selector import STATE_VERSION

Columns = Mapping[str, Mapping[str, Any]]
COLUMNS = "columns"  # of `Source.values`: what is in columns and is no tensor
GROUPS = "optimizer_groups"  # of `Source.values`


def column_source(format: str, columns: Columns, layers: Mapping[str, Mapping[str, int]],
                  values: Mapping[str, Any], description: Mapping[str, Any],
                  paths: Sequence[Path]) -> DerivedSource:
    """A source of whole tensors in columns; what is none goes to its `values[COLUMNS]`.

    Args:
        description, paths: see `Source.describe` and `Source.files`.
    """
    rest = {field: {name: value for name, value in column.items()
                    if not isinstance(value, Derived)} for field, column in columns.items()}
    return DerivedSource(
        marked((replace(value, key=(field, name)) for field, column in columns.items()
                for name, value in column.items() if isinstance(value, Derived)), layers),
        format, {**values, COLUMNS: rest}, layers, description, paths)


def ranked_source(format: str, ranks: Sequence[Columns], values: Mapping[str, Any],
                  description: Mapping[str, Any], paths: Sequence[Path]) -> DerivedSource:
    """The whole tensors of the ranks of one expert-parallel group.

    Args:
        ranks: columns of each rank, in rank order.
        description, paths: see `Source.describe` and `Source.files`.
    Raises:
        ValueError: see `reshard.merge`.
    """
    layers = moe_layers(ranks[0][MODEL])
    whole = {field: merge([rank.get(field, {}) for rank in ranks], layers) for field in ranks[0]}
    return column_source(format, whole, moe_layers(whole[MODEL]), values, description, paths)


def columns_of(source: Source) -> dict[str, dict[str, Any]]:
    """All that a source has in columns, tensors and other values."""
    whole: dict[str, dict[str, Any]] = {MODEL: {}}
    for field, name in source.entries:
        whole.setdefault(field, {})[name] = source.tensor((field, name))
    for field, column in source.values.get(COLUMNS, {}).items():
        whole.setdefault(field, {}).update(column)
    return whole


def columns_of_rank(source: Source, rank: int, size: int,
                    shards: int | Mapping[str, int] | None = None) -> dict[str, dict[str, Any]]:
    """What rank `rank` of an expert-parallel group of `size` stores of a source.

    Args:
        shards: ranks over which each expert is cut: of all layers, or by a layer's prefix.
    Raises:
        ValueError: see `reshard.split`.
    """
    if isinstance(shards, int):
        shards = dict.fromkeys(source.layers, shards)
    whole = columns_of(source)
    for prefix, origin in source.layers.items():  # of a format that does not store it
        whole[MODEL].setdefault(prefix + "_extra_state", {
            "version": STATE_VERSION, "num_experts": origin["num_experts"], "ep_size": 1,
            "ep_rank": 0})
    return {field: split(column, rank, size, source.layers, shards)
            for field, column in whole.items()}


def sizes_of(layers: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Expert-parallel size and shards that ranks' layers name, for `Source.describe`."""
    found = {}
    for name, key in (("ep", "ep_size"), ("shards", "shards")):
        given = sorted({origin[key] for origin in layers.values() if key in origin})
        if given:
            found[name] = given[0] if len(given) == 1 else given
    return found


def bytes_of_ranks(source: Source, world: int, ep: int) -> int:
    """Bytes of tensors that `world` ranks write, each its experts and everything else."""
    ahead, total = tuple(prefix + "experts." for prefix in source.layers), 0
    for (_, name), entry in source.entries.items():
        total += entry.nbytes * (world // ep if ahead and name.startswith(ahead) else world)
    return total
