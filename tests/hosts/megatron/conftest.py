"""What several Megatron tests share."""

from __future__ import annotations

import pytest

from tests import text


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An indexed dataset, in a path with a space."""
    from moe_plugin.hosts.megatron.data import documents, write_indexed

    folder = tmp_path_factory.mktemp("some data")
    (folder / "corpus.txt").write_text(text.documents(200))
    tokens = write_indexed(documents(str(folder / "corpus.txt")), str(folder / "corpus"))
    assert tokens > 50_000
    return str(folder / "corpus")
