"""How far a run is: a progress bar on a terminal, and a line after the first step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, TypeVar

from moe_plugin.messages import first_process
from moe_plugin.planner.units import show_time

T = TypeVar("T")


class _Silent:
    """The methods of a tqdm bar that we use; shows nothing."""

    def update(self, *_: object) -> None:
        pass

    set_postfix_str = close = __exit__ = update

    def __enter__(self) -> Any:
        return self


def progress(total: int | None, description: str, stream: TextIO | None = None, *,
             unit: str = "step") -> Any:
    """A bar with `update(n)`, `set_postfix_str(text)` and `close()`, also a context manager.

    A tqdm bar, with the time that is left, if `stream` (default: standard error) is a terminal,
    tqdm is installed and this is the first process of its job; otherwise a bar that shows nothing.

    unit: of what is counted; "B": bytes.
    """
    stream = stream if stream is not None else sys.stderr
    if not stream.isatty() or not first_process():
        return _Silent()
    try:
        from tqdm import tqdm
    except ImportError:
        return _Silent()
    return tqdm(total=total, desc=description, unit=unit, file=stream, dynamic_ncols=True,
                leave=False, unit_scale=unit == "B", unit_divisor=1024)


def tracked(items: Sequence[T], description: str, unit: str) -> Iterator[T]:
    """The items one after the other, under a bar that counts those that are done."""
    with progress(len(items), description, unit=unit) as bar:
        for item in items:
            yield item
            bar.update(1)


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
