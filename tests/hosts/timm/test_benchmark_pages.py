"""The pages of the benchmarks of vision: what is counted, and what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.hosts.timm.model import PRESETS, build
from scripts.bench.studies import STUDIES, ensembles, vision

pytest.importorskip("timm")
BENCHMARKS = Path(__file__).parents[3] / "docs" / "benchmarks"


def test_flops_are_those_of_the_dense_model_and_the_routers() -> None:
    size = PRESETS["tiny"]
    every = {"dispatch.capacity_factor": None}
    models = {"dense": build(size, 10, dense=True), "moe": build(size, 10, settings=every)}
    flops, dropped = vision.flops_of(models, torch.randn(2, 3, 16, 16))
    assert dropped == 0
    # two stages of 64 and 16 tokens of width 48 and 96: a projection, and 4 cosines
    routers = sum(2 * tokens * 256 * (width + 4) for tokens, width in ((64, 48), (16, 96)))
    assert flops["moe"] - flops["dense"] == routers
    # of one image: MLPs of all four blocks are less than all, qkv and attention the rest
    mlps = sum(2 * 2 * tokens * 2 * 4 * width ** 2 for tokens, width in ((64, 48), (16, 96)))
    assert mlps < flops["dense"] < 3 * mlps
    tight = {**models, "moe": build(size, 10, settings={"dispatch.capacity_factor": 0.25})}
    fewer, dropped = vision.flops_of(tight, torch.randn(2, 3, 16, 16))
    assert fewer["moe"] < flops["moe"] and 0.5 < dropped < 1


def test_page_of_vision_states_the_overhead() -> None:
    models = {side: build(PRESETS["tiny"], 10, dense=side == "dense") for side in vision.SIDES}
    one = vision.cell("tiny", 2, models, 1)
    assert all(seconds > 0 for kind in vision.KINDS for side in vision.SIDES
               for seconds in one["seconds"][kind][side])
    assert all(p.grad is None for model in models.values() for p in model.parameters())
    known = {**one, "batch": 8, "flops": {"dense": 2e6, "moe": 2.1e6}, "seconds": {
        "training": {"dense": [1.0, 2.0, 4.0], "moe": [3.0, 3.0, 9.0]},
        "forward": {"dense": [1.0], "moe": [1.25]}}}
    known_versions = {"versions": {"torch": "2"}, "load": [0.1, 0.2]}
    report = {**known_versions, "speed": [known], "accuracy": {
        "epochs": 3, "accuracy": {"dense": [0.97, 0.98], "moe": [0.98, 0.99]},
        "images_per_s": {"dense": [100.0, 120.0], "moe": [80.0, 90.0]}}}
    page = STUDIES["vision"].page(report)
    assert ("1.50 times the dense time in training and 1.25 times in the forward pass"
            in " ".join(page.split()))
    row = next(line for line in page.splitlines() if "| training " in line)
    assert [cell.strip() for cell in row.split("|")[1:8]] == [
        "`tiny`", "8", "training", "4", "2.67", "1.50", "1.050"]
    assert "98.50 (98.00 to 99.00) %" in page and "110.00 (100.00 to 120.00)" in page


def test_page_of_ensembles_compares_with_independent_members() -> None:

    def run(top1: float, oracle: float, other: list[int]) -> dict[str, Any]:
        return {"top1_error": top1, "oracle_error": oracle, "member_error": 0.2, "valid_loss": 1.0,
                "epoch": 2, "confidence": {"responsible": [1, 3], "other": other,
                                           "ensemble": [1, 3]}}

    independent, *_, last = ensembles.ROWS
    report = {"versions": {}, "epochs": 2, "results": {
        independent: [run(0.10, 0.05, [0, 0]), run(0.12, 0.05, [0, 0])],
        last: [run(0.11, 0.02, [3, 1]), run(0.10, 0.03, [3, 1])]}}
    page = STUDIES["ensembles"].page(report)
    assert "11.00 (10.00 to 12.00)" in page and "10.50 (10.00 to 11.00)" in page
    assert (f"* {last}: top-1 error changed by -5% and was lower in 1 of 2 seeds; oracle error "
            "changed by -50% and was lower in 2 of 2 "
            "seeds.") in " ".join(page.split())
    row = next(line for line in page.splitlines() if line.startswith(f"| {last} "))
    assert [cell.strip() for cell in row.split("|")[-3:-1]] == ["75%", "25%"]


def test_ensembles_have_three_seeds() -> None:
    report = json.loads((BENCHMARKS / "data" / "ensembles.json").read_text(encoding="utf-8"))
    assert all(len(found) == 3 for found in report["results"].values())
