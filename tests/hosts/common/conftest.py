"""The fixture `host`: a test that has it runs in every host."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.hosts.common.adapters import HOSTS, marked
from tests.hosts.common.host import Host

DATA = {"fairseq": "corpus", "megatron": "data"}
PACKAGES = {"fairseq": "fairseq", "megatron": "megatron.training"}


@pytest.fixture(params=[marked(name) for name in HOSTS])
def host(request: pytest.FixtureRequest) -> Host:
    """A host with its data."""
    name = request.param
    if importlib.util.find_spec(name) is None or importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"needs {PACKAGES[name]}")
    return HOSTS[name](request.getfixturevalue(DATA[name]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.distributed)
