"""What several Megatron tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import text


def make_data(folder: Path) -> str:
    """An indexed dataset of sentences; the prefix of its files."""
    from moe_plugin.hosts.megatron.data import documents, write_indexed

    (folder / "corpus.txt").write_text(text.documents(200))
    tokens = write_indexed(documents(str(folder / "corpus.txt")), str(folder / "corpus"))
    assert tokens > 50_000
    return str(folder / "corpus")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An indexed dataset, in a path with a space."""
    return make_data(tmp_path_factory.mktemp("some data"))
