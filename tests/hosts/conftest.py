"""Data of the hosts, which all tests of a process share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """fairseq's preprocessed sentences."""
    from tests.hosts.fairseq.conftest import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Megatron's indexed dataset, in a path with a space."""
    from tests.hosts.megatron.conftest import make_data

    return make_data(tmp_path_factory.mktemp("some data"))
