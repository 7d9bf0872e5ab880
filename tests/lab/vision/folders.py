"""Small folders of images."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moe_plugin.lab.vision.data import write_example


def image_folder(factory: pytest.TempPathFactory, example: str = "digits") -> Path:
    """The example, written once."""
    pytest.importorskip("sklearn")
    folder = factory.getbasetemp() / example
    write_example(example, folder)
    return folder


def few(images: Path, folder: Path, count: int = 12) -> Path:
    """A few images of each of three classes."""
    for part in ("train", "val"):
        for label in "012":
            place = folder / part / label
            place.mkdir(parents=True)
            for file in sorted((images / part / label).iterdir())[:count]:
                shutil.copy(file, place)
    return folder


def some(images: Path, folder: Path, count: int) -> Path:
    """A few images with masks."""
    for part in ("train", "val"):
        for kind in ("images", "masks"):
            place = folder / part / kind
            place.mkdir(parents=True)
            for file in sorted((images / part / kind).iterdir())[:count]:
                shutil.copy(file, place)
    return folder
