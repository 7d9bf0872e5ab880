"""Values in messages, shortened."""

from __future__ import annotations

from typing import Any

LIMIT = 200


def short(value: Any, limit: int = LIMIT) -> str:
    """A value as at most `limit` characters of a message: an error's text on one line, other values
    as Python writes them.
    """
    try:
        text = repr(value)
        if isinstance(value, BaseException):
            text = " ".join(str(value).split()) or text
    except (ValueError, RecursionError):  # an integer of more digits than Python writes, or nesting
        text = f"a {type(value).__name__} too large to show"
    if len(text) <= limit:
        return text
    note = f"... ({len(text)} characters)"
    return text[: limit - len(note)] + note
