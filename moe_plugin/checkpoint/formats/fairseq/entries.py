"""Entries of fairseq's checkpoint files, and which parameters an optimizer's numbers stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moe_plugin.checkpoint.source import Derived

STATE = "fairseq"  # of `Source.values`: what a file has besides tensors
CRITERION, OPTIMIZER = "criterion", "last_optimizer_state"
# of the manifest and of `Source.values`: names of the optimizer's parameters, in its order
PARAMETERS = "parameters"
# averaged weights in "extra_state": key -> field
AVERAGES = {"ema": "ema", "ema_fp32_params": "ema_fp32"}
# what fairseq registers and no optimizer updates
_BUFFERS = re.compile(r"(.*\.)?(version|_float_tensor|_future_mask)")


def trained_names(names: Sequence[str], model: Mapping[str, Any], count: int) -> list[str]:
    """Names of the parameters that an optimizer with `count` of them has, in its order; [] where
    they do not fit together.

    Args:
        names: of the model's tensors, in the order in which the model registers them.
        model: the tensors.
    """
    return next((kept for kept in names_of_parameters(names, model) if len(kept) == count), [])


def names_of_parameters(names: Sequence[str], model: Mapping[str, Any]) -> list[list[str]]:
    """What the names of a model's parameters may be, in their order: all of its tensors; without
    those that are tied to others. names, model: see `trained_names`.
    """
    names = [name for name in names
             if isinstance(model[name], Derived) and not _BUFFERS.fullmatch(name)]
    known: dict[Any, str] = {}  # tied parameters have one storage, and count once
    for name in names:
        known.setdefault(model[name].read, name)
    return [names, list(known.values()),
            [name for name in names if not name.endswith("output_projection.weight")]]


def names_by_order(state: Mapping[str, Any]) -> list[str]:
    """Names of the parameters of a file's optimizer that stores none: fairseq numbers them in the
    order of the model and then of the criterion. [] where numbers or shapes say that the optimizer
    stores something else (flattened parameters, several parts).
    """
    found = (state.get(OPTIMIZER) or {}).get("state") or {}
    known = {**state["model"], **{f"{CRITERION}.{name}": value for name, value
                                  in (state.get(CRITERION) or {}).items()}}
    names = trained_names(list(known), known, len(found))
    if list(found) != list(range(len(names))):
        return []
    fits = (not isinstance(value, Derived) or value.entry.shape in ((), known[name].entry.shape)
            for name, values in zip(names, found.values(), strict=True)
            for value in values.values())
    return names if all(fits) else []
