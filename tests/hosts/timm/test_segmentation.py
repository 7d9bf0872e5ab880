"""Foreground and background: images with masks, the head, its loss, training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moe_plugin.hosts.timm.data import Masks
from moe_plugin.hosts.timm.ensemble import SegmentHead
from moe_plugin.hosts.timm.model import build_ensemble
from moe_plugin.hosts.timm.tasks import VisionTask
from moe_plugin.hosts.timm.train import main
from moe_plugin.training.cmcl import EnsembleHeads, EnsembleSettings, uniform_divergence
from tests.hosts.timm.folders import image_folder, some
from tests.hosts.timm.test_ensemble import SMALL, images

pytest.importorskip("timm")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return some(image_folder(tmp_path_factory, "digits-with-masks"),
                tmp_path_factory.mktemp("some") / "images", 12)


def test_masks_are_cut_like_their_images(masked: Path) -> None:
    """Where the mask is of what the image shows, both are cut alike: white stays foreground."""
    from PIL import Image
    folder = masked.parent / "squares"
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
        for number in range(4):
            square = torch.zeros(16, 16, dtype=torch.uint8)
            square[2:9, 3 + number:10 + number] = 255 if kind == "images" else 7
            Image.fromarray(square.numpy()).save(folder / kind / f"{number}.png")
    found = Masks(folder, 32, training=True, flips=True)
    torch.manual_seed(0)
    sizes = set()
    for number in range(4):
        image, mask = found[number]
        assert image.shape == (3, 32, 32) and mask.shape == (32, 32)
        # the image's edge is blurred by a pixel of the cut, the mask's is not
        assert ((image[0] > 0) != mask.bool()).float().mean() < 0.12
        sizes.add(int(mask.sum()))
    assert len(sizes) > 1
    plain = Masks(folder, 16, training=False, flips=False)
    assert plain[0][1].sum() == 49 and plain.classes == ["background", "foreground"]
    x, y, real = next(plain.batches(3, 0, 1))
    assert x.shape == (3, 3, 16, 16) and y.shape == (3, 16, 16) and real.all()


def test_folders_that_do_not_fit(masked: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no images. --task segment needs images"):
        Masks(tmp_path, 16, training=False, flips=False)
    folder = some(masked, tmp_path / "part", 3) / "val"
    next((folder / "masks").iterdir()).unlink()
    with pytest.raises(ValueError, match="has no mask. Put a mask with the same name"):
        Masks(folder, 16, training=False, flips=False)


@pytest.mark.fast
def test_each_patch_gives_its_own_pixels() -> None:
    """Logits of a pixel come from its patch, in the order of rows and columns."""
    heads = EnsembleHeads(2, 2 * 9, 2)
    head = SegmentHead([2, 4], 3, 1, heads)
    stages = [[torch.randn(2, 4, 4, 2)], [torch.randn(2, 2, 2, 4)]]
    logits = head(stages)
    assert logits.shape == (2, 12, 12, 2, 2)
    h = head.decoders[0]([one for [one] in stages])
    want = (h[1, 2, 3] @ heads.w_out_MHC[1]).view(3, 3, 2)
    torch.testing.assert_close(logits[1, 6:9, 9:12, 1], want)


@pytest.mark.parametrize("begin", ["head", "layers.1"])
def test_members_have_decoders_of_their_own_where_they_part(begin: str) -> None:
    torch.manual_seed(0)
    model = build_ensemble(SMALL, 2, 3, begin=begin, segments=True)
    assert len(model.head.decoders) == (1 if begin == "head" else 3)
    logits = model(images(2))
    assert logits.shape == (2, 8, 8, 3, 2)
    logits[..., 1, :].sum().backward()
    touched = [any(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.parameters())
               for decoder in model.head.decoders]
    assert touched == ([True] if begin == "head" else [False, True, False])


@pytest.mark.fast
@pytest.mark.parametrize("by_image", [True, False])
def test_loss_and_errors_by_image_or_pixel(by_image: bool) -> None:
    logits = torch.randn(2, 4, 4, 3, 2, generator=torch.Generator().manual_seed(1))
    y = torch.randint(2, (2, 4, 4), generator=torch.Generator().manual_seed(2))
    task = VisionTask(EnsembleSettings(3, 0, 0.0, 1, 0.75, "exact", by_image), segments=True)
    for b in range(2):
        pixels = [(i, j) for i in range(4) for j in range(4)]
        total, errors = 0.0, 0.0
        for unit in ([pixels] if by_image else [[pixel] for pixel in pixels]):
            ce, kl, wrong = ([sum(f(m, i, j) for i, j in unit) for m in range(3)] for f in (
                lambda m, i, j: float(F.cross_entropy(logits[b, i, j, m], y[b, i, j])),
                lambda m, i, j: float(uniform_divergence(logits[b, i, j, m][None, None])),
                lambda m, i, j: float(logits[b, i, j, m].argmax() != y[b, i, j])))
            total += min(ce[m] + 0.75 * (sum(kl) - kl[m]) for m in range(3))
            errors += min(wrong)
        one = task.results(task.counts(logits[b:b + 1], y[b:b + 1], torch.tensor([True])))
        assert one["valid_loss"] == pytest.approx(total / 16, rel=1e-5)
        assert one["oracle_error"] == pytest.approx(errors / 16)
    found = task.results(task.counts(logits, y, torch.tensor([True, True])))
    mean = logits.softmax(-1).mean(3).argmax(-1)
    assert found["top1_error"] == pytest.approx(float((mean != y).float().mean()))
    both, either = ((mean == 1) & (y == 1)).sum(), ((mean == 1) | (y == 1)).sum()
    assert found["iou"] == pytest.approx(float(both / either))
    assert sum(found["confidence"]["responsible"]) == 32


def test_a_run_segments(masked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, *more: str) -> dict:
        out = tmp_path / name
        assert main(["--task", "segment", "--data", str(masked), "--out", str(out), "--epochs", "1",
                     "--batch-size", "6", *more]) == 0
        return json.loads((out / "log.jsonl").read_text().splitlines()[-1])

    found = run("one", "--flips")
    assert "IoU" in capsys.readouterr().out
    assert 0 <= found["iou"] <= 1 and 0 <= found["accuracy"] <= 1 and "oracle_error" not in found
    found = run("many", "--ensemble-heads", "2", "--oracle-unit", "pixel")
    assert sum(found["confidence"]["ensemble"]) == 12 * 256
    assert main(["--data", str(masked), "--out", str(tmp_path / "x"), "--ensemble-heads", "2",
                 "--oracle-unit", "pixel"]) == 2
    assert "oracle_unit=pixel is out of bounds: it must be image with" in capsys.readouterr().err
