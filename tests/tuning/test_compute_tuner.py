"""`compute: auto`: the rule and the decision are pure, what is measured once is kept, and measuring
disturbs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.cli.doctor import registries
from moe_plugin.comm import LocalComm
from moe_plugin.config import ExpertsConfig, from_dict
from moe_plugin.experts import strategies
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.layer import MoELayer
from moe_plugin.planner.units import show_time
from moe_plugin.routing.replay import checkpoint
from moe_plugin.tuning import compute_tuner as auto
from moe_plugin.tuning.compute_times import MeasuredChoices, timed
from moe_plugin.tuning.compute_tuner import (
    FEW_ROWS,
    MANY_ROWS,
    ComputeLoad,
    candidates,
    why_unmeasured,
)
from tests.experts.problems import parameters, problem

pytestmark = pytest.mark.fast

CPU = torch.device("cpu")
ALL = {"fused", "grouped", "batched", "loop", "kernels"}


@pytest.fixture(autouse=True)
def no_modes_of_other_tests() -> Iterator[None]:
    """Megatron on CPU leaves a torch function mode behind; nothing is measured under one."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(torch.overrides._pop_mode())
    yield
    for mode in reversed(modes):
        torch.overrides._push_mode(mode)


def load(rows_each: int, device: str = "cuda", even: bool = False, experts: int = 8) -> ComputeLoad:
    """A large layer's."""
    return ComputeLoad(device, torch.bfloat16, experts, 1024, 4096, False, rows_each * experts,
                       even, True,
                2)


@pytest.mark.parametrize("made,usable,names", [
    (load(FEW_ROWS - 1), ALL, ["kernels", "grouped"]),
    (load(FEW_ROWS), ALL, ["kernels", "grouped", "loop"]),
    (load(MANY_ROWS - 1), ALL, ["kernels", "grouped", "loop"]),
    (load(MANY_ROWS), ALL, ["kernels", "grouped", "loop"]),
    (load(MANY_ROWS), ALL | {"kernels split"},
     ["kernels", "kernels split", "grouped", "loop"]),
    (load(64), {"loop", "grouped"}, ["grouped"]),
    (load(MANY_ROWS), {"loop", "grouped"}, ["grouped", "loop"]),
    (load(64), {"loop"}, ["loop"]),
    (load(64, "cpu"), ALL, ["fused", "grouped"]),
    (load(64, "cpu", even=True), ALL, ["fused", "grouped", "batched"]),
    (load(MANY_ROWS, "cpu", even=True), ALL, ["fused"]),
    (load(0, "cpu"), ALL, ["fused", "grouped"]),
    (load(5, "cpu", experts=0), ALL, ["fused", "grouped"]),
])
def test_the_rule(made: ComputeLoad, usable: set[str], names: list[str]) -> None:
    assert candidates(made, usable) == names


def test_loads_of_one_bucket_share_a_choice() -> None:
    assert [load(n).bucket
            for n in (0, 1, 2, 3, 90, 91, 128, 181, 182)] == [0, 0, 1, 2, 6, 7, 7, 7, 8]
    assert load(100).label == load(150).label != load(200).label
    for change in ({"dtype": torch.float32}, {"experts": 4, "rows": 400}, {"width": 8},
                   {"inner": 8}, {"gated": True}, {"even": True}, {"planned": False}):
        assert dataclasses.replace(load(100), **change).label != load(100).label, change


def test_when_nothing_is_measured() -> None:
    names = ["kernels", "grouped"]
    assert why_unmeasured(load(512), names, "measured") is None
    assert why_unmeasured(load(512), names, "rule") == "experts.compute_selection=rule"
    assert "only candidate" in why_unmeasured(load(512), ["loop"], "measured")
    assert "too small" in why_unmeasured(load(1), names, "measured")


def test_bad_settings() -> None:
    with pytest.raises(ValueError,
                       match=r"experts.compute_selection='fastest' .* one of measured, rule"):
        ExpertsConfig(compute_selection="fastest")
    with pytest.raises(ValueError, match=r"experts.compute_selection=3 "):
        from_dict({"experts": {"compute_selection": 3}})


class Times:
    """Runs of candidates that take given seconds; the times arrive when `waits` is 0."""

    def __init__(self, seconds: dict[str, float], names: str = "ab") -> None:
        self.seconds, self.waits = seconds, 0
        self.started, self.ran = 0, []
        self.names = names

    def __call__(self) -> dict[str, Any]:
        self.started += 1
        return {name: functools.partial(self.run, name) for name in self.names}

    def run(self, name: str) -> float:
        if name not in self.seconds:
            raise torch.OutOfMemoryError("full")
        self.ran.append(name)
        return self.seconds[name] * (9 if self.ran.count(name) == 1 else 1)  # a slow warm-up

    def timed(self, run: Any, device: torch.device) -> Any:
        seconds = run()
        return lambda: None if self.waits else seconds


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that shows what runs return."""

    def timed(run: Any, device: torch.device) -> Any:
        return run.func.__self__.timed(run, device)

    monkeypatch.setattr("moe_plugin.tuning.compute_times.timed", timed)


def choose(known: MeasuredChoices, key: str, start: Times | None,
           device: torch.device = CPU) -> auto.ComputeChoice:
    return known.choose(key, list(start.names if start else "ab"), device, start)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("seconds,name", [
    ({"a": 1.0, "b": 0.5, "c": 0.7}, "b"),
    ({"a": 1.0, "b": 0.96}, "a"),
    ({"a": 1.0, "b": 0.94}, "b"),
    ({"b": 2.0, "c": 1.0}, "c"),
    ({"b": 1.0, "c": 0.96}, "b"),
    ({"c": 9.0}, "c"),
    ({}, "a"),
])
def test_the_decision(seconds: dict[str, float], name: str, tmp_path: Path,
                      caplog: pytest.LogCaptureFixture) -> None:
    made = choose(MeasuredChoices(tmp_path), "key", Times(seconds, "abc"))
    assert made.name == name
    assert all(show_time(s) in made.why for s in seconds.values())
    for left_out in set("abc") - set(seconds):
        assert f"{left_out} cannot be measured: full" in caplog.text
        assert f"{left_out} not measured" in made.why
    assert made.why.startswith("measured: " if seconds else "no time was measured: ")


@pytest.mark.usefixtures("told")
def test_measured_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moe_plugin.tuning.compute_times")
    times, known = Times({"a": 2.0, "b": 1.0}), MeasuredChoices(tmp_path)
    assert [choose(known, "key", times).name for _ in range(3)] == ["b"] * 3 and times.started == 1
    assert choose(known, "other key", Times({"a": 1.0, "b": 2.0})).name == "a"
    again = MeasuredChoices(tmp_path)
    assert choose(again, "key", None) == choose(known, "key", None)
    assert {(key, made.name)
            for key, made in again.files.listed()} == {("key", "b"), ("other key", "a")}
    assert choose(again, "key", None).why == "measured: a 2 s, b 1 s"
    assert len([r for r in caplog.records if "experts, key: b (measured" in r.getMessage()
                ]) == 1, "who restores it is silent"


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("scale,rounds", [(1e-3, 4), (1.0, 2)])
def test_candidates_are_timed_in_turn_and_less_often_when_slow(tmp_path: Path, scale: float,
                                                               rounds: int) -> None:
    times = Times({"a": 2 * scale, "b": scale})
    assert choose(MeasuredChoices(tmp_path), "key", times).name == "b"
    assert times.ran == ["a", "b"] * rounds


@pytest.mark.usefixtures("told")
def test_the_first_is_taken_while_a_device_is_busy(tmp_path: Path) -> None:
    times, known = Times({"a": 2.0, "b": 1.0}), MeasuredChoices(tmp_path)
    gpu = torch.device("cuda")
    assert choose(known, "key", None, gpu) == auto.ComputeChoice(
        "a", "not measured yet") and not times.started
    times.waits = 1
    assert [choose(known, "key", times, gpu).name for _ in range(20)] == ["a"] * 20
    times.waits = 0
    assert [choose(known, "key", times, gpu).name for _ in range(2)] == ["b", "b"]
    assert times.started == 1 and times.ran == ["a", "b"] * 4


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"key": "key"}', '{"key": "key", "name": 3, "why": ""}',
    '{"key": "other", "name": "b", "why": ""}', '{"key": "key", "name": "c", "why": ""}'
])
def test_files_that_say_nothing_are_measured_again(tmp_path: Path, text: str) -> None:
    choose(MeasuredChoices(tmp_path), "key", Times({"a": 1.0, "b": 2.0}))
    path = next((tmp_path / "expert-compute").iterdir())
    path.write_text(text)
    times = Times({"a": 2.0, "b": 1.0})
    assert choose(MeasuredChoices(tmp_path), "key", times).name == "b" and times.started == 1
    assert json.loads(path.read_text())["name"] == "b"


@pytest.mark.usefixtures("told")
def test_without_a_place_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr("moe_plugin.tuning.compute_times.user_cache", refuse)
    times, known = Times({"a": 2.0, "b": 1.0}), MeasuredChoices(tmp_path)
    assert [choose(known, "key", times).name for _ in range(2)] == ["b", "b"]
    assert times.started == 1 and known.files.listed() == []
    assert "measured again in the next run: no room" in caplog.text


def test_a_run_is_timed() -> None:
    ran = []
    seconds = timed(lambda: ran.append(1), CPU)
    assert len(ran) == 1 and 0 < seconds() == seconds()


@pytest.fixture
def small_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MeasuredChoices:
    """Small layers are measured too, into a folder of the test."""
    known = MeasuredChoices(tmp_path)
    monkeypatch.setattr(auto, "SMALL_LAYER", 0)
    monkeypatch.setattr(Workspace, "state", lambda memory, kind: known)
    monkeypatch.setattr(registries, "ChoiceFiles", lambda: known.files)
    return known


def layer_and_input(**experts: object) -> tuple[MoELayer, torch.Tensor]:
    torch.manual_seed(0)
    layer = MoELayer(
        from_dict({"model_dim": 16, "num_experts": 4, "experts": {"hidden_dim": 24, **experts}}),
        LocalComm())
    return layer, torch.randn(33, 16, requires_grad=True)


@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
def test_measuring_changes_nothing(small_counts: MeasuredChoices, kind: str,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_and_input(kind=kind)
    before, state = {n: p.clone() for n, p in layer.named_parameters()}, torch.get_rng_state()
    trials = []
    monkeypatch.setattr(auto, "trial",
                        lambda *args, real=auto.trial: trials.append(real(*args)) or trials[-1])
    first = torch.autograd.grad(layer(x).output.square().sum(), [x, *layer.parameters()])
    assert torch.equal(state, torch.get_rng_state()) and all(
        torch.equal(p, before[n]) for n, p in layer.named_parameters())
    assert all(p.grad is None for p in (x, *layer.parameters()))
    assert len(trials) == 1 and set(trials[0]) == {"fused", "grouped"}
    ruled, _ = layer_and_input(kind=kind, compute_selection="rule")
    ruled.load_state_dict(layer.state_dict())
    for mine, theirs in zip(
            first, torch.autograd.grad(ruled(x).output.square().sum(), [x, *ruled.parameters()]),
            strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    again = torch.autograd.grad(layer(x).output.square().sum(), [x, *layer.parameters()])
    assert len(trials) == 1 and all(
        torch.equal(a, b) for a, b in zip(first, again, strict=True)), "one choice, one result"
    [(key, made)] = small_counts.files.listed()
    assert "float32 D16 F24 L4" in key and made.why.startswith("measured: fused")


def test_modules_share_what_one_measured_through_files(monkeypatch: pytest.MonkeyPatch,
                                                       tmp_path: Path) -> None:
    """Nothing is kept but in the module and in the user's cache."""
    trials: list[str] = []
    monkeypatch.setattr(auto, "SMALL_LAYER", 0)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(auto, "trial", lambda load, *rest, real=auto.trial:
                        trials.append(load.label) or real(load, *rest))
    for _ in range(2):
        layer, x = layer_and_input()
        for _ in range(2):
            layer(x)
        assert len(trials) == 1
    next(tmp_path.rglob("*.json")).unlink()
    layer(x)
    assert len(trials) == 1
    layer_and_input()[0](x)
    assert len(trials) == 2


def test_not_measured_where_no_gradient_is_wanted(small_counts: MeasuredChoices) -> None:
    layer, x = layer_and_input()
    with torch.no_grad():
        layer(x)
    with torch.inference_mode():
        layer(x)
    assert small_counts.files.listed() == []
    layer(x)
    assert len(small_counts.files.listed()) == 1


@pytest.mark.parametrize("how", ["rule", "named", "deterministic"])
def test_not_measured_where_settings_say_so(small_counts: MeasuredChoices, how: str) -> None:
    layer, x = layer_and_input(
        **{"rule": {"compute_selection": "rule"}, "named": {"compute": "loop"}, "deterministic": {}
           }[how])
    torch.use_deterministic_algorithms(how == "deterministic")
    try:
        layer(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert small_counts.files.listed() == []


def test_measuring_inside_recomputation_and_autocast(small_counts: MeasuredChoices) -> None:
    layer, x = layer_and_input()
    for reentrant in (False, True):
        y = torch.utils.checkpoint.checkpoint(lambda v: layer(v).output, x, use_reentrant=reentrant)
        y.sum().backward()
        for path in small_counts.files.place().iterdir():
            path.unlink()
        small_counts.tuner.entries.clear()
    checkpoint(lambda v: layer(v).output, x).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x).output.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (x, *layer.parameters()))


@pytest.mark.parametrize("planned", [False, True])
def test_the_sample_is_the_bucket_s_load(planned: bool) -> None:
    made = ComputeLoad("cpu", torch.float32, 6, 8, 12, True, 6 * 100, False, planned,
                       4 if planned else 1)
    x, rows = auto.sample_load(made, CPU)
    counts = (rows.counts if planned else rows).host
    assert sum(counts) == 6 * 128 and max(counts) - min(counts) <= 1 and x.shape == (
        (192 if planned else 768), 8)
    if planned:
        assert sorted(rows.source_R.tolist()) == list(range(768))
        assert torch.equal(rows.position_TK.reshape(-1)[rows.source_R], torch.arange(768))


@pytest.mark.parametrize("gated", [False, True])
def test_every_candidate_runs_in_a_trial(gated: bool) -> None:
    from tests.kernels.problems import Shape

    x, _, p, plan = problem(Shape(64, 8, 16, 2, 24), gated, True, False, torch.float32)
    for rows, entry in ((plan, x), (plan.counts, torch.randn(plan.counts.total, x.shape[1]))):
        made = auto.load_of(entry, rows, parameters(p, "gelu"))
        names = ["fused", "grouped", "batched", "loop", "kernels", "kernels split"]
        later = LaterGrads()
        runs = auto.trial(made, names, CPU,
                          dataclasses.replace(parameters(p, "gelu"), later=later))
        assert list(runs) == names
        for run in runs.values():
            run()
        later.compute({})  # a trial has left nothing for the layer's weights


def test_the_doctor_lists_what_was_measured(small_counts: MeasuredChoices) -> None:
    assert registries.choice_rows() == []
    layer, x = layer_and_input()
    layer(x)
    [row] = registries.choice_rows()
    assert row["name"] in strategies and "rows an expert" in row["load"] and row["why"].startswith(
        "measured")
