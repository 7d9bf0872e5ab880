"""Parse settings and their values from command-line arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
# an assignment of Hydra
_ASSIGNED = re.compile(r"[+~]{0,2}(?:[\w@-]+[./])*([A-Za-z][\w-]*)=(.*)", re.DOTALL)
_WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False,
          "none": None}


def written(words: Iterable[str], several: Collection[str] = ()) -> dict[str, str]:
    """Return the settings in a command line by name. In the names of settings, `_` is replaced with
    `-`.

    The forms `--lr 3e-3`, `--lr=3e-3` and `optimization.lr=3e-3` are supported. A flag without a
    value has an empty string as its value.

    several: the names of flags that accept more than one value.
    """
    found: dict[str, str] = {}
    name = None
    for word in words:
        if flag := _FLAG.fullmatch(word):
            name = flag[1].replace("_", "-")
            found[name] = flag[2] or ""
            name = name if flag[2] is None else None
        elif name is not None:
            found[name] = f"{found[name]} {word}".lstrip()
            name = name if name in several else None
        elif setting := _ASSIGNED.fullmatch(word):
            found[setting[1].replace("_", "-")] = setting[2]
    return found


def comparable(value: Any) -> Any:
    """Convert a setting's value to a hashable form for comparisons. Values with the same meaning
    are converted to equal results.

    Numbers, booleans and None are also recognized in strings (`3e-3`, `on`, `none`). Sequences of
    different types are equal if all of their items are equal. A single-item sequence is equal to
    its item, because fairseq stores `--lr 0.003` as `[0.003]`.
    """
    if isinstance(value, str):
        if value.lower() in _WORDS:
            return _WORDS[value.lower()]
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return comparable(value[0]) if len(value) == 1 else tuple(map(comparable, value))
    return value if value.__hash__ else str(value)
