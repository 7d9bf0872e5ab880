"""A full disk while checkpoints and adapters are written: what was there stays, and nothing
half-written is left. In whole runs: tests/faults/test_folders.py.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.checkpoint import CheckpointError, save
from moe_plugin.utils.regular_files import system_error, write_remedy

pytestmark = pytest.mark.fast


def failing(number: int) -> Any:
    """Writes a part of a file, then fails."""
    def copy(source: Any, target: Any) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    return copy


def test_a_copy_on_a_full_disk_shares_the_storage(tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("fairseq")
    from moe_plugin.checkpoint.formats.fairseq import files

    source, target = tmp_path / "checkpoint_1_3.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    monkeypatch.setattr(shutil, "copyfile", failing(errno.ENOSPC))
    files.copy(str(source), str(target))
    assert target.read_bytes() == b"new" and target.samefile(source)
    assert "the disk is full" in caplog.text and len(list(tmp_path.iterdir())) == 2


def test_a_copy_that_fails_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fairseq")
    from moe_plugin.checkpoint.formats.fairseq import files

    source, target = tmp_path / "checkpoint_1_3.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    monkeypatch.setattr(shutil, "copyfile", failing(errno.EIO))
    with pytest.raises(CheckpointError, match=f"{target}' cannot be written .Input/output error"):
        files.copy(str(source), str(target))
    assert target.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2


def test_a_save_leaves_no_folder_that_is_half_written(tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MoELayer(MoEConfig(model_dim=8, num_experts=2))
    save(tmp_path / "checkpoint", layer)
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()}
    monkeypatch.setattr(torch, "save", lambda state, stream: failing(errno.ENOSPC)(
        None, tmp_path / "checkpoint.writing" / "part"))
    with pytest.raises(CheckpointError, match="No space left on device.*older checkpoint there"):
        save(tmp_path / "checkpoint", layer)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert {path: path.read_bytes() for path in before} == before


def test_the_cause_behind_an_error(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "full")
    outer = RuntimeError("unexpected pos 704 vs 598")
    outer.__context__ = full
    assert system_error(outer) is full and system_error(RuntimeError("other")) is None
    assert "the disk is full" in write_remedy(outer, tmp_path)
    assert "the disk is full" not in write_remedy(RuntimeError("other"), tmp_path)
