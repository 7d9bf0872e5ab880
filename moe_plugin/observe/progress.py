"""How far a run is: a progress bar on a terminal, and a line after the first step."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from moe_plugin.planner.units import show_time


class _Silent:
    """The methods of a tqdm bar that we use; shows nothing."""

    def update(self, *_: object) -> None:
        pass

    set_postfix_str = close = __exit__ = update

    def __enter__(self) -> Any:
        return self


def progress(total: int | None, description: str, stream: TextIO | None = None) -> Any:
    """A bar with `update(n)`, `set_postfix_str(text)` and `close()`, also a context manager.

    A tqdm bar if `stream` (default: standard error) is a terminal and tqdm is installed; otherwise
    a bar that shows nothing.
    """
    stream = stream if stream is not None else sys.stderr
    if not stream.isatty():
        return _Silent()
    try:
        from tqdm import tqdm
    except ImportError:
        return _Silent()
    return tqdm(total=total, desc=description, unit="step", file=stream, dynamic_ncols=True,
                leave=False)


def first_step(seconds: float, tokens: float, left: int | None) -> str:
    """What the first step of a run says of the rest, for the log.

    Args:
        seconds: of the step.
        tokens: of all ranks in it.
        left: steps after it; None: not known.
    """
    text = f"first step: {show_time(seconds)}, {tokens / seconds:,.0f} tokens/s"
    if left is None:
        return text
    steps = "1 step" if left == 1 else f"{left:,} steps"
    return f"{text}; {steps} left, {show_time(left * seconds)} if all take as long"
