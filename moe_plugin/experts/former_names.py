"""The names that experts' parameters had in earlier versions, which files may still contain."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

# former name -> name now
FORMER = {"b_in_LF": "bias_in_LF", "b_gate_LF": "bias_gate_LF", "b_out_LD": "bias_out_LD"}
# name now -> name in Megatron's distributed checkpoints, which every version reads
IN_MEGATRON = {now: former for former, now in FORMER.items()}
# adapters of peft put the experts one level deeper; optimizer fields may follow the name
_IN_FULL = re.compile(rf"(?<![^.])experts\.((?:base_layer\.)*)({'|'.join(FORMER)})(?![^.])")


def current_name(name: str) -> str:
    """Return a tensor's name in a model or file with the present name of the experts' parameter."""
    return _IN_FULL.sub(lambda found: f"experts.{found[1]}{FORMER[found[2]]}", name)


def with_current_names(column: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping in its order, with `current_name` of every key.

    Raises:
        ValueError: a parameter is there under both names.
    """
    renamed = {current_name(name): value for name, value in column.items()}
    if len(renamed) < len(column):
        both = next(name for name in column if current_name(name) != name in column)
        raise ValueError(f"{both!r} is there under its present name, too ({current_name(both)!r}): "
                         "a file must contain one of the two; remove the older one")
    return renamed


def use_current_names(state: MutableMapping[str, Any], prefix: str) -> None:
    """Rename the parameters of one layer's experts in a state dict.

    Args:
        state: is changed. A parameter that is there under both names keeps them.
        prefix: the beginning of the experts' names, with a trailing dot.
    """
    for former, now in FORMER.items():
        if prefix + former in state and prefix + now not in state:
            state[prefix + now] = state.pop(prefix + former)
