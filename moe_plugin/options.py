"""Building blocks of the settings tree: a leaf with its help, and checks whose errors name value, bound and remedy."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), flag: str = "") -> Any:
    """A leaf of the tree: default value, help text, optional fixed choices, optional host flag name."""
    return field(default=default, metadata={"help": help, "choices": choices, "flag": flag})


def check(ok: bool, path: str, value: Any, bound: str, remedy: str) -> None:
    """`ValueError` naming the setting, its value, the bound and the remedy, unless `ok`."""
    if not ok:
        raise ValueError(f"{path}={value!r} is out of bounds: must be {bound}; {remedy}")


def check_choices(config: Any, prefix: str) -> None:
    """`check` every leaf of a dataclass that names its choices."""
    for f in dataclasses.fields(config):
        choices = f.metadata.get("choices")
        if choices:
            value = getattr(config, f.name)
            check(value in choices, prefix + f.name, value, f"one of {', '.join(choices)}", "choose one of these")
