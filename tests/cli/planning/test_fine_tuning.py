"""Plans of fine-tuning: what the answer states, what is refused, and the measured peak memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from moe_plugin.cli.measure.model_files import read_source
from moe_plugin.kernels.frozen import FROZEN_FORMATS
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import cluster_of, device_of
from moe_plugin.planner.fine_tuned import BF16, FORMATS, FineTunedModel, FineTuning
from moe_plugin.planner.model import ModelPlan
from moe_plugin.planner.plan_cost import plan_cost

pytest.importorskip("transformers.integrations.moe")
pytest.importorskip("accelerate")
from scripts.bench.plan_memory import COMMON, SHAPES, measured, predicted_by_plan  # noqa: E402

MIXTRAL = {**COMMON, **SHAPES["Mixtral, 2 of 8 experts"], "num_hidden_layers": 2}
SMALL = ["--gpus", "4", "--device", "h100", "--network", "ib400", "--sequence", "64"]


def written(folder: Path, values: dict) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(("shape", "format"), [
    ("Mixtral, 2 of 8 experts", "nf4"), ("Qwen3-MoE, 8 of 32", "fp8"),
    ("OLMoE, 4 of 16", "mxfp4"), ("GLM-4.5, 4 of 16", BF16)])
def test_the_predicted_peak_is_the_measured_one(shape: str, format: str) -> None:
    values, tuning = {**COMMON, **SHAPES[shape]}, FineTuning(format=format, rank=4)
    buffers = 1e7  # of compiled functions on a CPU, of which a plan for GPUs knows nothing
    assert measured(values, "eager", tuning) == pytest.approx(
        predicted_by_plan(values, tuning) + buffers / 2, rel=0.05, abs=buffers / 2)


def model_of(path: Path, **tuning: object) -> FineTunedModel:
    read = read_source(path, 4, 64, 4, FineTuning(**tuning)).model  # type: ignore[arg-type]
    assert isinstance(read, FineTunedModel)
    return read


def test_every_format_is_known() -> None:
    assert set(FORMATS) == {*FROZEN_FORMATS, BF16}


@pytest.mark.parametrize("format", FORMATS)
def test_parts_of_the_memory_of_a_rank(format: str, tmp_path: Path) -> None:
    m = model_of(written(tmp_path, MIXTRAL), format=format, rank=4)
    weights = 2 * 8 * 3 * 256 * 512  # layers, experts, matrices
    assert m.code_bytes == pytest.approx(weights * m.format_bytes[format])
    # a and b of the first two weights, which share a, and of the last weight
    assert m.in_experts == 2 * 8 * 4 * (256 + 2 * 512 + 512 + 256)
    plan = ModelPlan(tp=1, pp=1, dp=4, ep=2, etp=1, micro_batch=1, layout=LayoutChoice(r=1))
    cluster, device = cluster_of("ib400", 4, "h100"), device_of("h100")
    cost = plan_cost(m.in_host("transformers"), cluster, device, plan)
    assert cost.memory["codes"] == m.code_bytes / 2
    assert cost.memory["expert gradients"] == m.in_experts  # 2 bytes on one of two ranks
    assert cost.memory["dense gradients"] == cost.memory["expert parameters"] == 0
    assert cost.memory["dense parameters"] == 2 * m.outside / 4
    assert ("decoding" in cost.time) == (format != BF16)


def test_codes_on_the_host(tmp_path: Path) -> None:
    path = written(tmp_path, {**MIXTRAL, "num_hidden_layers": 4})
    plan = ModelPlan(tp=1, pp=1, dp=4, ep=4, etp=1, micro_batch=1, layout=LayoutChoice(r=1))
    cluster, device = cluster_of("ib400", 4, "h100"), device_of("h100")
    device_model, host = (model_of(path, format="nf4", store=store, link_bytes_s=1e9)
                          for store in ("device", "host"))
    on_device, on_host = (plan_cost(m, cluster, device, plan) for m in (device_model, host))
    assert device_model.host_bytes(plan, 4) == {}
    assert host.host_bytes(plan, 4) == {"codes": host.code_bytes}
    saved = on_device.memory_bytes - on_host.memory_bytes
    assert saved == device_model.savings(plan)["--store host"] > 0
    assert on_host.time["copies of experts"] == 2 * host.code_bytes / 4 / 1e9


def test_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, MIXTRAL)
    assert main(["plan", "--model", str(path), *SMALL, "--fine-tune", "nf4"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("fits: TP1 PP1 DP4 EP")
    for part in ("codes", "weights", "adapters", "gradients", "optimizer", "activations",
                 "buffers", "of host memory per node", "step"):
        assert part in first
    assert lines[0].startswith("lowest number of ranks that fits: 1 ")
    assert any("adapters of rank 8" in line for line in lines)
    assert any("freeze_experts(model, 'nf4')" in line for line in lines)
    assert any(line.endswith("--store host") for line in lines)


@pytest.mark.parametrize(("changes", "options", "message"), [
    ({}, ["--lora-rank", "4"], "--lora-rank needs --fine-tune FORMAT"),
    ({}, ["--fine-tune", "bf16", "--store", "disk"], "needs experts that are stored as codes"),
    ({}, ["--fine-tune", "nf4", "--host", "megatron"], "cannot fine-tune quantized experts"),
    ({}, ["--fine-tune", "nf4", "--link", "1GB"], "--link needs"),
    ({"intermediate_size": 100}, ["--fine-tune", "nf4"], "format=nf4 cannot store"),
    ({"hidden_size": 8192, "intermediate_size": 65536, "num_hidden_layers": 48},
     ["--fine-tune", "fp8"], "--fine-tune nf4: "),
])
def test_errors_name_a_remedy(changes: dict, options: list[str], message: str, tmp_path: Path,
                              capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {**MIXTRAL, **changes})
    assert main(["plan", "--model", str(path), *SMALL, *options]) == 2
    assert message in capsys.readouterr().err


def test_other_hosts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("torchrun pretrain_gpt.py --num-layers 2 --hidden-size 8\n")
    with pytest.raises(ValueError, match="needs a model of transformers"):
        read_source(path, 4, 64, 4, FineTuning(format="nf4"))
