"""What several Megatron tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.megatron.ranks import ROOT


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An indexed dataset of this project's own source, in a path with a space."""
    from moe_plugin.hosts.megatron.data import documents, write_indexed

    folder = tmp_path_factory.mktemp("some data")
    text = "\n\n".join(path.read_text() for path in sorted(Path(ROOT, "moe_plugin").rglob("*.py")))
    (folder / "corpus.txt").write_text(text)
    tokens = write_indexed(documents(str(folder / "corpus.txt")), str(folder / "corpus"))
    assert tokens > 50_000
    return str(folder / "corpus")
