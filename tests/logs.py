"""What a logger says while something runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from moe_plugin.utils.messages import warn_once


@contextmanager
def warned(name: str) -> Iterator[list[str]]:
    """Warnings of a logger as in a fresh process, where none was said before; one item each."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    warn_once.cache_clear()
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
