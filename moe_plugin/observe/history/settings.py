"""Values of settings, as hosts write them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any


def comparable(value: Any) -> Any:
    """Equal where two settings are: numbers and None also as text, sequences of any kind. Can be a
    key.
    """
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(comparable(one) for one in value)
    return value if value.__hash__ else str(value)
