"""Writing a dataset: regular files only, complete or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

pytestmark = [pytest.mark.fast, pytest.mark.megatron]


def test_what_cannot_be_read_or_written_is_named_and_nothing_stays(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.datasets import indexed_dataset

    from moe_plugin.hosts.megatron import data

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "taken.idx").mkdir()
    with pytest.raises(ValueError, match="taken.idx cannot be written.*is a folder"):
        data.write_indexed([b"text"], str(tmp_path / "taken"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe' is a pipe, not a regular file"):
        data.write_indexed(data.documents(str(tmp_path / "pipe")), str(tmp_path / "corpus"))
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(indexed_dataset.IndexedDatasetBuilder, "finalize", full)
    with pytest.raises(ValueError, match="corpus.bin cannot be written.*disk is full"):
        data.write_indexed([b"text"], str(tmp_path / "corpus"))
    assert set(tmp_path.iterdir()) == before
