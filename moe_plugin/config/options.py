"""Building blocks of the settings tree: a leaf with its help, and checks whose errors name value,
bound and remedy.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), flag: str = "") -> Any:
    """A leaf of the tree: default value, help text, optional fixed choices, optional host flag
    name.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "flag": flag})


def check(ok: bool, path: str, value: Any, bound: str, remedy: str) -> None:
    """`ValueError` naming the setting, its value, the bound and the remedy, unless `ok`."""
    if not ok:
        raise ValueError(f"{path}={value!r} is out of bounds: must be {bound}; {remedy}")


def check_leaves(section: Any, prefix: str) -> None:
    """`ValueError` for a value of the wrong type in a section that was built in code or below it,
    or none of its choices.
    """
    hints = hints_of(type(section))
    for f in dataclasses.fields(section):
        value, path = getattr(section, f.name), prefix + f.name
        if not dataclasses.is_dataclass(hints[f.name]):
            _convert(hints[f.name], value, path)
        elif isinstance(value, hints[f.name]):
            check_leaves(value, f"{path}.")
        else:
            raise ValueError(
                f"{path}={value!r} is a {type(value).__name__}; must be "
                f"{hints[f.name].__name__}(...)"
            )
        choices = f.metadata.get("choices")
        if choices:
            check(value in choices, path, value, f"one of {', '.join(choices)}",
                  "choose one of these")


def build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    """A section from plain nested values. Unknown keys, wrong types and bad values are a
    `ValueError` that names the path `prefix` + key.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(str(key) for key in set(values) - set(fields))
    if unknown:
        raise ValueError(
            f"unknown key {prefix + unknown[0]!r}; known keys here: {', '.join(sorted(fields))}")
    hints = hints_of(cls)
    built = {name: _convert(hints[name], value, prefix + name) for name, value in values.items()}
    return cls(**built)


def hints_of(cls: type) -> dict[str, Any]:
    """Field types of a section, as types."""
    return typing.get_type_hints(cls)


def _convert(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if isinstance(value, str) and hasattr(hint, "SHORTHAND"):
            value = {hint.SHORTHAND: value}
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{path}={value!r} must be a mapping with keys {', '.join(hints_of(hint))}")
        return build(hint, value, path + ".")
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{path}={value!r} must be a mapping of name to number, e.g. {{gshard: 0.01}}")
        return {str(key): _scalar(float, item, f"{path}.{key}") for key, item in value.items()}
    options = typing.get_args(hint)
    if type(None) in options:
        return None if value is None else _scalar(options[0], value, path)
    return _scalar(hint, value, path)


def _scalar(kind: type, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{path}={value!r} must be a finite number")
        return float(value)
    if kind is not float and isinstance(value,
                                        kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{path}={value!r} is a {type(value).__name__}; must be {kind.__name__}")
