"""`moe-plugin plan --memory`: what it explains and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from moe_plugin.planner.offload.schedule import BlockProfile, ModelProfile

pytestmark = pytest.mark.fast

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


def plan(profile: str, *words: str) -> int:
    return main(["plan", "--profile", profile, *words])


def test_it_explains_what_every_block_does(profile: str,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(profile, "--memory", "1100MiB") == 0
    text = capsys.readouterr().out
    assert "toy: 8 blocks; keeping everything needs 1.42 GiB, the limit is 1.07 GiB" in text
    assert "keep all        does not fit (1.42 GiB)" in text
    assert "recompute all" in text and "swap all" in text and "no other decisions are fast" in text
    assert text.count("block 7") == 1 and "peak 1.0" in text
    assert plan(profile, "--memory", "1100MiB", "--json") == 0
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
    assert plan(profile, "--memory", "1100MiB", "--trace", str(trace), "--plot", str(plot)) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"forward block 0", "backward block 7"} <= {e["name"] for e in events}
    assert "<svg" in plot.read_text()


def test_weights_that_stream(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(profile, "--memory", "600MiB", "--weights-on", "host") == 0
    text = capsys.readouterr().out
    assert "with all weights 330 MiB" in text
    assert "computing hides all copies but the first load" in text
    assert plan(profile, "--memory", "600MiB", "--weights-on", "host", "--accumulate", "3",
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
    assert plan(profile, *words) == 2
    assert match in capsys.readouterr().err
    assert main(["plan", "--model", "x"]) == 2
    assert "--cluster FILE is missing" in capsys.readouterr().err
