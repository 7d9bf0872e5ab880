"""Replace attributes of an object for a short time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside the block, set attributes of a module, class or object to other values.

    The result is also a decorator: attributes are then replaced during each call of a function.
    """
    before = {name: vars(owner).get(name, _MISSING) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
