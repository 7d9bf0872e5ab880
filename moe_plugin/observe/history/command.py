"""The words of a command as settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_ASSIGNED = re.compile(r"[+~]{0,2}(?:[\w@-]+[./])*([A-Za-z][\w-]*)=(.*)", re.DOTALL)  # Hydra's


def written(words: Iterable[str], several: Collection[str] = ()) -> dict[str, str]:
    """The settings of a command by name, with - for _: `--lr 3e-3`, `--lr=3e-3`,
    `optimization.lr=3e-3`. Empty text: no value follows.

    several: names of flags that take more than one word.
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
