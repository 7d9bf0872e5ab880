"""Tensors in files: windows of any strides, and files that are cut short while they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from moe_plugin.checkpoint import CheckpointError, file_workers, save
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers all formats
from moe_plugin.checkpoint.formats.base import CheckpointSizes, open_source
from moe_plugin.checkpoint.source import MODEL
from tests.fuzz.hostile import bounded

pytestmark = pytest.mark.fast

AXES = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=4)


@given(AXES, st.data(), st.sampled_from([(1 << 23, 1 << 16), (64, 16), (4, 4)]))
@bounded(200)
def test_strided_tensors_are_read_as_they_lie(
        tmp_path: Path, axes: list[tuple[int, int]], data: st.DataObject,
        limits: tuple[int, int]) -> None:
    """Axes in any order, with gaps between them or all at one place, in one piece or many."""
    order, stride, step = data.draw(st.permutations(range(len(axes)))), [0] * len(axes), 1
    for axis in order:
        stride[axis] = data.draw(st.sampled_from([step, step, step, 0]))
        step *= max(axes[axis][0], 1) * axes[axis][1]
    shape, offset = [size for size, _ in axes], data.draw(st.integers(0, 9))
    numbers_N = torch.arange(offset + 6**4 * 3**4 + 1, dtype=torch.int32)[:offset + step + 1]
    path = tmp_path / "numbers"
    path.write_bytes(b"odd" + numbers_N.numpy().tobytes())
    with pytest.MonkeyPatch.context() as patch, open(path, "rb") as file:
        patch.setattr(file_workers, "SPAN", limits[0])
        patch.setattr(file_workers, "GAP", limits[1])
        found = file_workers.read_strided(file.fileno(), 3 + 4 * offset, shape, stride, torch.int32)
    assert torch.equal(found, numbers_N[offset:].as_strided(shape, stride))


def _plain(folder: Path) -> Path:
    save(folder, nn.Linear(1000, 1000, bias=False))
    return folder / "part-00000-of-00001.pt"


def _hugging_face(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.randn(1000, 1000)}, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("write", [_plain, _hugging_face])
def test_a_file_that_is_cut_while_it_is_read_is_named(
        write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path / "in")
    with open_source(tmp_path / "in") as source:
        first = source.read((MODEL, "weight"), (slice(0, 1),))
        os.truncate(path, path.stat().st_size // 2)
        assert torch.equal(source.read((MODEL, "weight"), (slice(0, 1),)), first)
        with pytest.raises(CheckpointError, match=f"{path.name}.*truncated while it was"):
            source.read((MODEL, "weight"))
        with pytest.raises(CheckpointError, match=path.name):
            Conversion(source, tmp_path / "out", source.format, CheckpointSizes()).run()
    assert not (tmp_path / "out").exists()
