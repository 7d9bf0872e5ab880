"""Entries of fairseq's checkpoint files, conversion of stored setting values, and functions that
map the parameter indices of an optimizer to parameter names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from math import prod
from typing import Any

from torch import Tensor

from moe_plugin.checkpoint.source import MODEL, Derived, TensorEntry, Window
from moe_plugin.experts.base import with_current_names

STATE = "fairseq"  # key in `Source.values`: all entries of a file that are not tensors
CRITERION, OPTIMIZER = "criterion", "last_optimizer_state"
# key in the manifest and in `Source.values`: names of the optimizer's parameters, in its order
PARAMETERS = "parameters"
# averaged weights in "extra_state": key -> field
AVERAGES = {"ema": "ema", "ema_fp32_params": "ema_fp32"}
# fairseq's names of activations, as stored settings and its flags have them: the name -> ours
ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "swish": "silu", "relu_squared": "squared_relu",
}
# tensors that fairseq registers and that an optimizer never updates
_BUFFERS = re.compile(r"(.*\.)?(version|_float_tensor|_future_mask)")


def plain_value(value: Any) -> Any:
    """If the value is a choice (an enum) of fairseq's dataclasses, convert it to a string. Return
    other values unchanged.
    """
    return value.value if isinstance(value, Enum) else value


def renamed(state: Any) -> Any:
    """Give the model weights and averaged weights in a file's contents their current names."""
    extra = state.get("extra_state") if isinstance(state, dict) else None
    for part, keys in ((state, (MODEL,)), (extra, AVERAGES)):
        if not isinstance(part, dict):
            continue
        for key in keys:
            if isinstance(column := part.get(key), dict):
                part[key] = with_current_names(column)
    return state


def trained_names(names: Sequence[str], model: Mapping[str, Any], count: int) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of the optimizer. If no candidate
    list has `count` names, return an empty list.

    Args:
        names: names of the model's tensors, in the order in which the model registers them.
        model: tensors of the model, by name.
        count: number of parameters that the optimizer has.
    """
    return next((kept for kept in names_of_parameters(names, model) if len(kept) == count), [])


def names_of_parameters(names: Sequence[str], model: Mapping[str, Any]) -> list[list[str]]:
    """Return several lists of parameter names, which are candidates for the parameters of an
    optimizer. Each list is in the order in which the model registers the parameters.

    The candidates are all tensors, all tensors without tied duplicates, and all tensors without the
    output projection. See `trained_names` for the arguments.
    """
    names = [name for name in names
             if isinstance(model[name], Derived) and not _BUFFERS.fullmatch(name)]
    known: dict[Any, str] = {}  # tied parameters share one storage and are counted once
    for name in names:
        known.setdefault(model[name].read, name)
    return [names, list(known.values()),
            [name for name in names if not name.endswith("output_projection.weight")]]


def names_by_order(state: Mapping[str, Any]) -> list[str]:
    """Return the parameter names for optimizer state that a file stores by parameter index only.

    fairseq numbers the parameters of the model first and those of the criterion second, both in the
    order of registration. If the indices or shapes show that the state is flattened or split into
    several parts, return an empty list.
    """
    state_by_index = (state.get(OPTIMIZER) or {}).get("state") or {}
    known = {**state["model"], **{f"{CRITERION}.{name}": value for name, value
                                  in (state.get(CRITERION) or {}).items()}}
    names = trained_names(list(known), known, len(state_by_index))
    if list(state_by_index) != list(range(len(names))):
        return []
    fits = (not isinstance(value, Derived) or value.entry.shape in ((), known[name].entry.shape)
            for name, values in zip(names, state_by_index.values(), strict=True)
            for value in values.values())
    return names if all(fits) else []


def by_parameter(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Split flattened optimizer state into the state of each parameter.

    If the optimizer does not have exactly one parameter with as many elements as the model and the
    criterion together, return `state` unchanged.

    Without `--fp16-no-flatten-grads`, fairseq <= 0.12.3 stores the fp32 copies of all parameters in
    one vector. This vector contains the parameters of the model first and those of the criterion
    second (see `FP16Optimizer.build_fp32_params`). The vector is not saved in any file.
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
    """Return the elements of the flat vector that belong to a parameter with the shape `shape`.
    `start` is the index of the first of these elements.
    """
    row = prod(shape[1:])

    def read(window: Window) -> Tensor:
        if not shape:
            return flat.read((slice(start, start + 1),))[0]
        first, *others = window
        rows_N = flat.read((slice(start + first.start * row, start + first.stop * row),))
        return rows_N.view(first.stop - first.start, *shape[1:])[(slice(None), *others)]

    return Derived(flat.key, TensorEntry(shape, flat.entry.dtype), read)
