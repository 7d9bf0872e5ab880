"""A run that compares itself with its prediction: which steps count, what is exchange."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.config import ObserveConfig, RunConfig
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.observe.history.predictions import prediction_record
from moe_plugin.observe.prediction import STEPS, exchange_s
from moe_plugin.observe.rank_skew import skew_of
from moe_plugin.planner.prediction import PARTS, Prediction, dump_prediction
from moe_plugin.records import Placement

HOST, GPU = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def event(name: str, begin: float, end: float, device: object = HOST) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device,
                           time_range=SimpleNamespace(start=begin, end=end))


@pytest.mark.fast
def test_exchange_is_what_no_product_hides() -> None:
    host = [event("gloo:all_to_all", 0, 10), event("gloo:recv", 5, 20), event("aten::mm", 8, 12),
            event("aten::add", 15, 30), event("autograd", 0, 100)]
    assert exchange_s(host) == pytest.approx(11e-6)  # 0 to 8, 12 to 15
    assert exchange_s(host[2:]) == 0
    gpu = [event("ncclKernel_AllReduce", 0, 50, GPU), event("gemm", 10, 40, GPU)]
    assert exchange_s([*host, *gpu]) == pytest.approx(20e-6)


def steps(folder: Path, number: int, **settings: object) -> list[dict]:
    """The lines that a plain run of so many steps wrote."""
    folder.mkdir(exist_ok=True)
    path = folder / "prediction.json"
    path.write_text(dump_prediction(Prediction(parts={"products": [1.0, 2.0, 3.0]})))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if settings:
        model = nn.Sequential(nn.Linear(8, 8), _Output(MoELayer(MoEConfig(model_dim=8))))
    run = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1),
                        lambda m, x: m(x).square().mean(),
                        settings=RunConfig(observe=ObserveConfig(
                            prediction=str(path), **settings)))
    for step in range(number):
        scale = float("inf") if step == 3 else 1.0
        run(scale * torch.randn(4, 8))
    run.close()
    files = [folder / "measured.jsonl", folder / "stats.jsonl"]
    return [json.loads(line) for file in files if file.exists()
            for line in file.read_text().splitlines()]


class _Output(nn.Module):
    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.layer(x_TD).output


def test_one_record_of_the_steps_that_count(tmp_path: Path, caplog: pytest.LogCaptureFixture
                                            ) -> None:
    with caplog.at_level(logging.INFO):
        [row] = steps(tmp_path, STEPS + 4)
    found = prediction_record(row)
    assert found.step == STEPS + 1  # one was skipped
    assert set(found.parts) == set(PARTS) and found.parts["exchange"] == 0  # of one rank
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.parts["optimizer"] > 0 and found.memory_bytes > 0
    assert found.line() in caplog.text


def test_the_load_of_ranks_is_counted(tmp_path: Path) -> None:
    rows = steps(tmp_path, STEPS + 4, jsonl=str(tmp_path / "stats.jsonl"))
    [found] = [prediction_record(row) for row in rows if "measured" in row]
    assert found.skew == 1.0  # of one rank
    assert "the busiest rank has 1.00 times the mean rows, predicted 1.00" in found.line()
    [plain] = steps(tmp_path / "plain", STEPS + 4)
    assert prediction_record(plain).skew == 0 and "busiest" not in prediction_record(plain).line()


@pytest.mark.fast
@pytest.mark.parametrize("ranks, shards, skew", [(4, None, (2.0 + 1.6) / 2), (2, 2, 1.0),
                                                 (8, None, (3.2 + 2.4) / 2)])
def test_skew_is_the_busiest_ranks_rows_over_the_mean(ranks: int, shards: int | None,
                                                      skew: float) -> None:
    load_NE = torch.tensor([[4, 1, 1, 1, 1, 1, 1, 0], [1, 3, 1, 1, 1, 1, 1, 1]])
    comm = SimpleNamespace(size=ranks, all_reduce=lambda x: 3 * x)  # of other ranks as much, twice
    layer = SimpleNamespace(placement=Placement(comm, 8, None, configured_shards=shards))
    assert skew_of(load_NE, layer) == pytest.approx(skew)


def test_a_short_run_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert steps(tmp_path, STEPS) == []
    assert f"{STEPS - 1} steps were made, and it takes {STEPS}" in caplog.text


def test_it_goes_to_the_records_and_leaves_a_timeline_its_step(tmp_path: Path) -> None:
    rows = steps(tmp_path, STEPS + 4, jsonl=str(tmp_path / "stats.jsonl"), timeline=STEPS)
    [row] = [row for row in rows if "measured" in row]
    assert row["step"] == STEPS + 2 and any("timeline" in row for row in rows)
    assert not (tmp_path / "measured.jsonl").exists()
