"""Optimizer state of fp16 runs that flatten their parameters, as state of each parameter.

Without `--fp16-no-flatten-grads`, fairseq <= 0.12.3 keeps the fp32 copies of all parameters in one
vector: those of the model in its order, then those of the criterion, each in its own order of
memory (`FP16Optimizer.build_fp32_params`). Its optimizer has one parameter, whose state has as many
numbers; the fp32 copies themselves are in no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from typing import Any

from torch import Tensor

from moe_plugin.checkpoint.formats.fairseq.entries import CRITERION, OPTIMIZER, names_of_parameters
from moe_plugin.checkpoint.source import MODEL, Derived, TensorEntry, Window


def by_parameter(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A file's content whose optimizer state is of each parameter, where its one parameter has as
    many numbers as all those of the model and the criterion; else as it is.
    """
    optimizer = state.get(OPTIMIZER) or {}
    vectors, groups = optimizer.get("state") or {}, optimizer.get("param_groups") or []
    if list(vectors) != [0] or len(groups) != 1 or list(groups[0].get("params", ())) != [0]:
        return state
    sizes = {value.entry.shape for value in vectors[0].values()
             if isinstance(value, Derived) and value.entry.shape != ()}
    model = {**state[MODEL], **{f"{CRITERION}.{name}": value for name, value
                                in (state.get(CRITERION) or {}).items()}}
    for names in names_of_parameters(list(model), model):
        shapes = [model[name].entry.shape for name in names]
        if sizes == {(sum(map(prod, shapes)),)} and sizes != set(shapes):
            parts = {index: dict(_parts(vectors[0], shape, start)) for index, (shape, start)
                     in enumerate(zip(shapes, accumulate(map(prod, shapes), initial=0),
                                      strict=False))}
            group = {**groups[0], "params": list(parts)}
            return {**state, OPTIMIZER: {**optimizer, "state": parts, "param_groups": [group]}}
    return state


def _parts(values: Mapping[str, Any], shape: tuple[int, ...],
           start: int) -> Iterator[tuple[str, Any]]:
    for field, value in values.items():
        vector = isinstance(value, Derived) and value.entry.shape != ()
        yield field, _part(value, shape, start) if vector else value


def _part(flat: Derived, shape: tuple[int, ...], start: int) -> Derived:
    """shape: of the parameter whose numbers begin at `start`."""
    row = prod(shape[1:])

    def read(window: Window) -> Tensor:
        if not shape:
            return flat.read((slice(start, start + 1),))[0]
        first, *others = window
        rows_N = flat.read((slice(start + first.start * row, start + first.stop * row),))
        return rows_N.view(first.stop - first.start, *shape[1:])[(slice(None), *others)]

    return Derived(flat.key, TensorEntry(shape, flat.entry.dtype), read)
