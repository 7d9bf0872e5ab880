"""These tests read the whole source as trees of millions of objects without cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    """Looking for garbage among them takes four times as long as the tests themselves."""
    gc.disable()
    yield
    gc.enable()
