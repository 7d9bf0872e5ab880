"""Experiments with images of digits: SwinV2 with and without experts, and ensembles."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_plugin.hosts.timm.data import write_example
from moe_plugin.hosts.timm.model import PRESETS, build
from scripts.bench.images import train_images
from scripts.bench.paired import compare
from scripts.bench.studies.vision import flops_of

log = logging.getLogger(__name__)
EXAMPLE = PRESET = "mnist"
FOLDS = 5  # number of parts of the images; seeds use different parts for validation
COMMON = ["--preset", PRESET, "--batch-size", "32"]
SIDES = {"moe": [], "active": ["--dense"],
         "total": ["--dense", "--widen", str(PRESETS[PRESET].experts)]}
MEMBERS = 5
_ENSEMBLE = ["--dense", "--ensemble-heads", str(MEMBERS), "--ensemble-from", "patch_embed"]
# settings of CMCL's code: k = 4 of 5, beta = 0.75, sharing with probability 0.7 in a low layer
ROWS = {
    "independent": [*_ENSEMBLE, "--oracle-k", str(MEMBERS)],
    "cmcl": [*_ENSEMBLE, "--oracle-k", "4", "--oracle-beta", "0.75", "--ensemble-sharing", "0.7",
             "--ensemble-share-after", "layers.0.blocks.0"],
}


def flops() -> dict[str, float]:
    """Return the FLOPs of each model's forward pass for one image, if no token is dropped."""
    size = PRESETS[PRESET]
    x_BCSS = torch.randn(2, 3, size.image, size.image)
    experts = build(size, 10, settings={"dispatch.capacity_factor": None})
    wide = build(size, 10, dense=True, widen=size.experts)
    counted, _ = flops_of({"dense": build(size, 10, dense=True), "moe": experts}, x_BCSS)
    return {"moe": counted["moe"], "active": counted["dense"],
            "total": flops_of({"dense": wide, "moe": experts}, x_BCSS)[0]["dense"]}


def measure(place: Path, rows: Mapping[str, Sequence[str]], results: Sequence[str], judged: str, *,
            epochs: int, rates: Sequence[float], seeds: int, jobs: int) -> dict[str, Any]:
    """Train all models, and return the result of `compare` for each run's last evaluation. `rows`
    contains the options of the training script for each model, and `results` the names of the
    results to read from the training log.
    """
    for fold in range(FOLDS):
        write_example(EXAMPLE, place / f"fold {fold}", fold)

    def run(row: str, rate: float, seed: int) -> dict[str, Any]:
        out = place / f"{row} {epochs} epochs {rate:g} seed {seed}"
        found = train_images(
            out, "--data", str(place / f"fold {seed % FOLDS}"), "--epochs", str(epochs), "--lr",
            f"{rate:g}", "--seed", str(seed), *COMMON, *rows[row])[-1]
        said = {name: found[name] for name in results if name in found}
        log.info("%s, rate %g, seed %d: %s", row, rate, seed, said)
        return said

    return {"epochs": epochs, **compare(jobs, dict.fromkeys(rows, rates), seeds, run, judged)}
