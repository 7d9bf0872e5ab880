"""The timeline of a step: layers forward and backward, exchanges, matmuls; only in the step asked
for, only on rank 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.comm import run_simulated
from moe_plugin.config import ObserveConfig
from moe_plugin.observe.history import read_run
from moe_plugin.observe.timeline import BACKWARD, MARK, StepTimeline, spans

pytestmark = pytest.mark.fast

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def event(name: str, start: float, end: float, number: int = -1,
          device: object = CPU) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end),
                           sequence_nr=number, device_type=device)


def test_one_step_is_recorded_with_both_passes_of_each_layer(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    layers = {name: MoELayer(MoEConfig(model_dim=8, num_experts=2)) for name in ("first", "second")}
    timeline = StepTimeline(ObserveConfig(jsonl=str(path), timeline=2), layers)
    for step in (1, 2, 3):
        with timeline.around(step):
            x = layers["first"](torch.randn(16, 8, requires_grad=True)).output
            layers["second"](x).output.sum().backward()
    row, = (json.loads(line) for line in path.read_text().splitlines())
    assert row["step"] == 2 and row["rank"] == 0
    names = [name for track, name, _, _ in row["timeline"] if track == "layers"]
    assert list(dict.fromkeys(names)) == [
        "first forward", "second forward", "second backward", "first backward"
    ]
    begins = [begin for track, _, begin, _ in row["timeline"] if track == "layers"]
    assert begins == sorted(begins) and any(track == "matmuls" for track, *_ in row["timeline"])
    (_, found), = read_run(tmp_path).timelines.items()
    assert [[s.track, s.name, s.start_s, s.end_s] for s in found] == row["timeline"]
    assert all(not layer._forward_pre_hooks and not layer._forward_hooks
               for layer in layers.values())


def test_a_step_ends_when_the_devices_of_the_layers_have_done_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the current device, of which a model in parts may have nothing."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    there = [torch.device("cuda", 1), torch.device("cuda", 2)]
    layers = {}
    for device in there:
        layers[str(device)] = torch.nn.Linear(1, 1)
        layers[str(device)].parameters = lambda of=device: [SimpleNamespace(device=of)] * 2
    config = ObserveConfig(jsonl=str(tmp_path / "x.jsonl"), timeline=1)
    with StepTimeline(config, layers).around(1):
        pass
    assert sorted(waited, key=str) == there


def test_other_ranks_record_nothing(tmp_path: Path) -> None:
    config = ObserveConfig(jsonl=str(tmp_path / "x.jsonl"), timeline=1)
    assert run_simulated(2,
                         lambda comm: StepTimeline(config, {}, comm).path is not None) == [True,
                                                                                           False]


def test_a_step_that_fails_leaves_no_hooks(tmp_path: Path) -> None:
    layer = MoELayer(MoEConfig(model_dim=8, num_experts=2))
    timeline = StepTimeline(ObserveConfig(jsonl=str(tmp_path / "x.jsonl"), timeline=1),
                            {"a": layer})
    with pytest.raises(ValueError, match="the layer expects"), timeline.around(1):
        layer(torch.randn(4, 9))
    assert not layer._forward_pre_hooks and not layer._forward_hooks and not (tmp_path /
                                                                              "x.jsonl").exists()


def test_what_the_profiler_says_becomes_spans() -> None:
    found = spans([
        event(MARK + "a", 100, 400),
        event("aten::mm", 150, 250, 5),
        event("aten::add", 450, 460, 8),
        event("gloo:all_to_all", 200, 900, device=CPU),
        event(BACKWARD + "X", 1000, 1100, 6),
        event(BACKWARD + "Y", 1120, 1200, 7),
        event(BACKWARD + "Other", 1300, 1400, 8),
        event("ncclDevKernel_SendRecv", 300, 500, device=CUDA),
        event("sm90_gemm_bf16", 500, 600, device=CUDA),
        event("elementwise", 600, 650, device=CUDA),
        event(MARK + "a", 100, 400, device=CUDA)
    ])
    assert found == [["layers", "a forward", 0.0, 0.0003], ["layers", "a backward", 0.0009, 0.0011],
                     ["exchange", "all_to_all", 0.0001, 0.0008],
                     ["matmuls", "mm", 0.00005, 0.00015],
                     ["GPU exchange", "ncclDevKernel_SendRecv", 0.0002, 0.0004],
                     ["GPU matmuls", "sm90_gemm_bf16", 0.0004, 0.0005],
                     ["GPU other", "elementwise", 0.0005, 0.00055]]
    assert spans([]) == []


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="observe.timeline=-1.*>= 0"):
        ObserveConfig(timeline=-1, jsonl="x")
    with pytest.raises(ValueError, match="observe.timeline=3.*set observe.jsonl"):
        ObserveConfig(timeline=3)
