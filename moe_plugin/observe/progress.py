"""A progress bar on a terminal, nothing in a file."""

from __future__ import annotations

import sys
from typing import Any, TextIO


class _Silent:
    """The methods of a tqdm bar that we use; shows nothing."""

    def update(self, n: float = 1) -> None:
        """Ignore."""

    def set_postfix_str(self, s: str) -> None:
        """Ignore."""

    def close(self) -> None:
        """Ignore."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def progress(total: int | None, description: str, *, unit: str = "step",
             stream: TextIO | None = None) -> Any:
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
    return tqdm(total=total, desc=description, unit=unit, file=stream, dynamic_ncols=True,
                leave=False)
