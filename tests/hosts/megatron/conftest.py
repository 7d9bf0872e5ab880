"""What several Megatron tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import text

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
STARTS_RANKS = {"on_ranks", "run_main", "launched"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.megatron)
            if STARTS_RANKS & vars(item.module).keys():
                item.add_marker(pytest.mark.distributed)


def make_data(folder: Path) -> str:
    """An indexed dataset of sentences; the prefix of its files."""
    from moe_plugin.hosts.megatron.data import documents, write_indexed

    (folder / "corpus.txt").write_text(text.documents(200))
    tokens = write_indexed(documents(str(folder / "corpus.txt")), str(folder / "corpus"))
    assert tokens > 50_000
    return str(folder / "corpus")
