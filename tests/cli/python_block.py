"""Runs a block of Python in a process that has imported the layer (tests/preloaded.py)."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import moe_plugin.layer  # noqa: F401 - 2 s, in each block otherwise


def printed(text: str) -> str:
    """What a program prints."""
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(text, "<block>", "exec"), {"__name__": "__main__"})
    return out.getvalue()
