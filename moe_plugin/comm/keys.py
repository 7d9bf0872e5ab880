"""Keys by which operations of torch, which take no other objects, find groups and routes."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

_NUMBERS = itertools.count()
# Keys stand for objects of this process, which keeps none of them alive.
_BY_KEY: WeakValueDictionary[str, Any] = WeakValueDictionary()


def key_of(owner: object) -> str:
    """A new key by which operations find this object for as long as it lives."""
    key = f"{type(owner).__name__} {next(_NUMBERS)}"
    _BY_KEY[key] = owner
    return key


def owner_of(key: str) -> Any:
    """The object of a key."""
    return _BY_KEY[key]
