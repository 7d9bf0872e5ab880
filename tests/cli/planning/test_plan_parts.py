"""`moe-plugin plan` with `--memory`, `--pipeline` and `--prefill`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from moe_plugin.cli.main import main
from moe_plugin.cli.planning.pipeline import prefill_table
from moe_plugin.planner.cluster import Cluster, load_cluster
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.offload.schedule import BlockProfile, ModelProfile
from moe_plugin.planner.once import GroupShape, all_to_all_s
from moe_plugin.planner.pipeline.choice import StageProfile, choose, predict
from moe_plugin.planner.prefill import Kernel

pytestmark = pytest.mark.fast


# `moe-plugin plan --memory`: what it explains and writes, and what it refuses.


MIB = 2**20
PROFILE = ModelProfile(
    name="toy", base_bytes=10 * MIB, in_bytes_s=4e9, out_bytes_s=4e9, blocks=[
        BlockProfile(name=f"block {j}", forward_s=0.01, backward_s=0.02,
                     activation_bytes=100 * MIB, kept_bytes=5 * MIB, parameter_bytes=40 * MIB,
                     gradient_bytes=40 * MIB, workspace_bytes=8 * MIB) for j in range(8)])


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """The file of a profile."""
    return str(PROFILE.save(tmp_path / "profile.json"))


def plan_memory(profile: str, *words: str) -> int:
    return main(["plan", "--profile", profile, *words])


def test_it_explains_what_every_block_does(profile: str,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_memory(profile, "--memory", "1100MiB") == 0
    text = capsys.readouterr().out
    assert "toy: 8 blocks; keeping everything needs 1.42 GiB, the limit is 1.07 GiB" in text
    assert "keep all        does not fit (1.42 GiB)" in text
    assert "recompute all" in text and "swap all" in text and "no other decisions are fast" in text
    assert text.count("block 7") == 1 and "peak 1.0" in text
    assert plan_memory(profile, "--memory", "1100MiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["uniform"]["keep"] is None and found["peak_bytes"] <= 1100 * MIB
    assert found["compute_s"] <= found["seconds"] <= min(
        found["uniform"]["recompute"], found["uniform"]["swap"])
    kinds = {block["decision"] for block in found["blocks"]}
    assert kinds <= {"keep", "recompute", "swap"} and len(kinds) > 1
    for block in found["blocks"]:  # no change of a single block helps
        assert all(v is None or v >= -1e-9 for v in block["others"].values())


def test_timelines_are_written(profile: str, tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "plan.svg"
    assert plan_memory(profile, "--memory", "1100MiB", "--trace", str(trace), "--plot",
                       str(plot)) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"forward block 0", "backward block 7"} <= {e["name"] for e in events}
    assert "<svg" in plot.read_text()


def test_weights_that_stream(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_memory(profile, "--memory", "600MiB", "--weights-on", "host") == 0
    text = capsys.readouterr().out
    assert "with all weights 330 MiB" in text
    assert "computing hides all copies but the first load" in text
    assert plan_memory(profile, "--memory", "600MiB", "--weights-on", "host", "--accumulate", "3",
                "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["micro_batches"] == 3 and sum(found["segments"]) == 8
    assert found["peak_bytes"] <= 600 * MIB


EXPERTS = ["plan", "--model", "configs/plans/gpt_64_experts.yaml", "--device",
           "configs/devices/a100_80g.yaml"]


@pytest.mark.parametrize(("memory", "design", "setting"), [
    ("80GB", "resident", "experts.store: device\n"),
    ("20GB", "pre_gated", "experts.store: host, router.pre_gate: 1 (trained so), experts.cache up"),
    ("2300MiB", "on_demand", "experts.store: host, experts.cache up to 1"),
])
def test_where_experts_lie(memory: str, design: str, setting: str, tmp_path: Path,
                           capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main([*EXPERTS, "--memory", memory, "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert f"{design} is the fastest within" in text and setting in text
    assert text.count("does not fit") == {"resident": 0, "pre_gated": 1, "on_demand": 3}[design]
    names = {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert ("copy 0.11 expert 1" in names) == (design != "resident")
    assert main([*EXPERTS, "--memory", memory, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == design and found["limit_bytes"] >= next(
        d["peak_bytes"] for d in found["designs"] if d["design"] == design)


def test_a_faster_link_and_more_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    def on_demand(*words: str) -> float:
        assert main([*EXPERTS, "--memory", "80GB", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)["designs"][1]["seconds"]

    assert on_demand("--link", "50GB") < on_demand() == on_demand("--link", "25GB")
    assert on_demand() < on_demand("--tokens", "8")


@pytest.mark.parametrize(("words", "match"), [
    (["--memory", "1GB"], "smallest design, on_demand, needs 2356674560"),
    (["--memory", "80GB", "--tokens", "0"], "12 MoE layers and a pass has 0 tokens"),
    (["--memory", "80GB", "--link", "0"], "bytes_s=0 must be from 1"),
    (["--tokens", "2"], "--tokens needs --memory, --model and --device"),
    (["--memory", "80GB", "--weights-on", "host"], "needs --profile FILE instead of --model"),
    (["--memory", "80GB", "--cluster", "x"], "--cluster plans parallel sizes"),
])
def test_places_of_experts_are_refused_by_name(words: list[str], match: str,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXPERTS, *words]) == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize(("words", "match"), [
    (("--memory", "100MiB"), "a limit of 104857600 bytes is too small"),
    (("--memory", "100MiB", "--weights-on", "host"), "a limit of 104857600 bytes is too small"),
    (("--memory", "1GiB", "--weights-on", "host", "--accumulate", "0"),
     "accumulated micro-batches is 0; it must be from 1"),
    (("--memory", "1GiB", "--accumulate", "2"), "--accumulate 2 needs --weights-on host"),
    (("--memory", "lots"), "'lots' is not a size"),
    ((), "--memory SIZE and --profile FILE must be used together"),
    (("--memory", "1GiB", "--scale", "1"), "--scale plans parallel sizes"),
    (("--memory", "1GiB", "--tokens", "2"), "--tokens needs --memory, --model and --device"),
])
def test_bad_input_is_refused_by_name(profile: str, words: tuple[str, ...], match: str,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_memory(profile, *words) == 2
    assert match in capsys.readouterr().err
    assert main(["plan", "--model", "x"]) == 2
    assert "--cluster FILE is missing" in capsys.readouterr().err


# `moe-plugin plan --pipeline`: what it shows and writes, and what it refuses.


EXAMPLE = Path(__file__).resolve().parents[3] / "configs" / "pipelines" / "four_stages.yaml"


def plan_pipeline(*words: str) -> int:
    return main(["plan", "--pipeline", *words])


def test_it_compares_schedules_and_draws_the_best(tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert plan_pipeline(str(EXAMPLE), "--trace", str(trace)) == 0
    text = capsys.readouterr().out
    assert "best: eager-1f1b" in text and "7 5 3 1" in text and "4 3 2 1" in text
    lanes = [line for line in text.splitlines() if line.startswith("stage ")]
    assert len(lanes) == 4 and all("p" in lane for lane in lanes)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward 0 0", "send backward 3 15", "thread_name"} <= names


def test_less_memory_takes_less_eager_schedules(tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text().replace("memory_bytes: 4000000000", "memory_bytes: 2000000000")
    (tmp_path / "less.yaml").write_text(text)
    assert plan_pipeline(str(tmp_path / "less.yaml"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == "1f1b"
    assert [one["fits"] for one in found["schedules"]] == [False, True]


LONG = """micro_batches: 2
forward_s: [1.0, 1.0, 1.0, 1.0]
backward_s: [2.0, 2.0, 2.0, 2.0]
transfer_s: 0.01
activation_bytes: [1000, 1000, 1000, 1000]
memory_bytes: 4000
sequence: 64
slice_samples: [[8, 0, 0.1], [16, 0, 0.19], [32, 0, 0.4], [64, 0, 1.0], [8, 56, 0.15],
                [16, 48, 0.29], [32, 32, 0.6]]
"""


def test_long_sequences_and_few_micro_batches_are_cut(tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.yaml").write_text(LONG)
    assert plan_pipeline(str(tmp_path / "long.yaml"), "--trace", str(tmp_path / "trace.json")) == 0
    assert "best: terapipe, slices " in capsys.readouterr().out
    assert plan_pipeline(str(tmp_path / "long.yaml"), "--json") == 0
    best, *others = json.loads(capsys.readouterr().out)["schedules"]
    assert best["schedule"] == "terapipe" and sum(best["slices"]) == 64
    assert sorted(best["slices"], reverse=True) == best["slices"]
    assert best["seconds"] < 0.75 * others[0]["seconds"]
    assert max(best["micro_batches_kept"]) <= 2


def test_batch_and_slices_are_cut_together(tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """As the best of plans for each size of a micro-batch."""
    sizes = [(8, 0), (16, 0), (32, 0), (64, 0), (8, 56), (16, 48), (32, 32)]
    samples = {b: [[n, c, 0.2 + 0.01 * max(b * n, 256) + 1e-4 * b * n * c] for n, c in sizes]
               for b in (1, 2, 4, 8)}
    common = {"activation_bytes": [1000] * 4, "sequence": 64}
    together = StageProfile(
        **common, micro_batches=4, batch=8, forward_s=[2.8] * 4, backward_s=[5.6] * 4,
        transfer_s=0.01, memory_bytes=8000,
        slice_samples=[[b, *one] for b, rows in samples.items() for one in rows])
    (tmp_path / "batch.json").write_text(json.dumps(asdict(together)))
    assert plan_pipeline(str(tmp_path / "batch.json"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    apart = {b: next(one for one in predict(StageProfile(
        **common, micro_batches=8 // b, forward_s=[b * 1.4] * 4, backward_s=[b * 2.8] * 4,
        transfer_s=0.005 * b, slice_samples=rows)) if one.slices) for b, rows in samples.items()}
    size = min(apart, key=lambda b: apart[b].seconds)
    best = found["schedules"][0]
    assert best["sequences"] == size > 1 and best["slices"] == list(apart[size].slices)
    assert best["seconds"] == pytest.approx(apart[size].seconds)
    assert best["micro_batches_kept"] == pytest.approx([n * size / 2 for n in apart[size].alive])
    assert sum(count for count, _ in found["groups"]) == 8
    assert all(sum(slices) == 64 for _, slices in found["groups"])
    assert plan_pipeline(str(tmp_path / "batch.json")) == 0
    text = capsys.readouterr().out
    assert f"best: terapipe, micro-batches of {size} sequences, slices " in text
    assert "TeraPipe's own cut): " in text
    # where activations of so many do not fit, smaller ones are taken
    less = replace(together, memory_bytes=3000)
    assert choose(less).fits and choose(less).sequences < size


def test_equal_schedules_are_megatrons() -> None:
    profile = StageProfile(micro_batches=4, forward_s=[1.0, 1.0], backward_s=[2.0, 2.0])
    assert [one.seconds for one in predict(profile)] == [15, 15]
    assert choose(profile).schedule == "1f1b"


@pytest.mark.parametrize("text, words", [
    ("forward_s: [1.0]\nbackward_s: []", "Set one number per stage"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nmemory_bytes: 5", "activation_bytes"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nmemory_bytes: 5\nactivation_bytes: [9]",
     "memory_bytes=5 is too small"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\ntransport: pigeon", "Choose from nccl, gloo"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nsequence: 64", "Each sample needs three numbers"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nsequence: 9\nslice_samples: [[1, 0, 1.0]]",
     "granularity=8 must be"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nbatch: 2", "batch=2 must be a multiple of"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nbatch: 2\nsequence: 8\nslice_samples: [[8, 0, 1.0]]",
     "Each sample needs four numbers"),
    ("forward_s: [-1.0]\nbackward_s: [1.0]", "must be seconds"), ("slow: 1", "unknown key 'slow'"),
])
def test_bad_files_are_named(text: str, words: str, tmp_path: Path,
                             capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert plan_pipeline(str(tmp_path / "bad.yaml")) == 2
    assert words in capsys.readouterr().err


# `moe-plugin plan --prefill`: pieces and kernel by prompt length.


CONFIGS = Path(__file__).parents[3] / "configs"
MODEL = ModelShape(layers=2, model_dim=64, ffn_dim=64, experts=8, top_k=2)
# 1 ms per call and 2 us per row, or 3 us per row: alike at 1 ms over 4 experts, 250 rows
KERNELS = {"large": Kernel(((0, 0.0), (8192, 8192 * 2e-6)), 1e-3),
           "small": Kernel(((0, 0.0), (8192, 8192 * 3e-6)))}
CLUSTER = load_cluster(CONFIGS / "clusters/emulated.yaml").resized(2, 1)


def test_a_row_for_each_length() -> None:
    found = prefill_table(MODEL, CLUSTER, KERNELS, (100, 4000))
    few, many = found.rows
    assert (few.rows, many.rows) == (50, 2000)  # 2 choices each over 4 experts here, of two ranks
    size = 4000 * 2 * 64 * 2
    exchange = all_to_all_s(CLUSTER, GroupShape(2), "linear", size)
    assert many.whole_s == pytest.approx(2 * exchange + 1e-3 + 4 * 2000 * 2e-6)
    assert many.best.seconds < many.whole_s and many.best.pieces > 1
    assert few.best.seconds <= few.whole_s
    # from 250 rows per expert on, of 500 tokens on each rank, the first is as fast or faster
    assert found.kernels == ((500, "small", "large"),)


def test_one_rank_sends_nothing() -> None:
    row, = prefill_table(MODEL, Cluster(nodes=1, ranks_per_node=1), KERNELS, (1000,)).rows
    assert row.best.pieces == 1 and row.best.seconds == row.whole_s == pytest.approx(
        1e-3 + 2000 * 2e-6)
    with pytest.raises(ValueError, match="8 experts cannot be divided equally among 3 ranks"):
        prefill_table(MODEL, Cluster(nodes=3, ranks_per_node=1), KERNELS, (1,))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = tmp_path / "k.yaml"
    kernels.write_text(yaml.safe_dump({"kernels": {
        "large": {"launch_s": 1e-3, "points": [[1, 2e-6], [8192, 8192 * 2e-6]]},
        "small": {"points": [[1, 3e-6], [8192, 8192 * 3e-6]]}}}))
    words = ["plan", "--prefill", "64,4096", "--model", str(CONFIGS / "plans/small.yaml"),
             "--cluster", str(CONFIGS / "clusters/one_nic.yaml"), "--nodes", "2",
             "--ranks-per-node", "1", "--kernels", str(kernels)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "kernel large instead of small" in text and "parallel.prefill: true" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in found["rows"]] == [64, 4096]
    for wrong, message in (({"kernels": {"a": {"points": [[1, 1.0]]}}}, "at least 2 points"),
                           ({"kernels": {"a": [1]}}, "must contain, for each kernel, points"),
                           ({"kernels": {}}, "the profile contains no kernels")):
        kernels.write_text(yaml.safe_dump(wrong))
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert main([*words, "--plot", "x.png"]) == 2
    assert "--plot cannot be combined with --prefill" in capsys.readouterr().err
