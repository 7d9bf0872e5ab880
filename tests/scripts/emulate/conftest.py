"""An emulated cluster for tests, where the machine allows one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from scripts.emulate import EmulatedCluster, why_not


@pytest.fixture
def cluster() -> Iterator[Callable[..., EmulatedCluster]]:
    """`cluster(nodes, ranks_per_node, **links)`, taken down after the test; skips with the reason
    where none can run.
    """
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(nodes: int, ranks_per_node: int, **links: Any) -> EmulatedCluster:
            return stack.enter_context(EmulatedCluster(nodes, ranks_per_node, **links))

        yield make
