"""`compute: auto`: the rule and the decision are pure, what is measured once is kept, and measuring
disturbs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.cli.doctor import packages
from moe_plugin.comm import LocalComm
from moe_plugin.config import ExpertsConfig, from_dict
from moe_plugin.experts import strategies
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.layer import MoELayer
from moe_plugin.planner.units import show_time
from moe_plugin.routing.replay import checkpoint
from moe_plugin.tuning import compute_tuner as auto
from moe_plugin.tuning.compute_times import ChoiceFiles, MeasuredChoices, SharedChoices, timed
from moe_plugin.tuning.compute_tuner import (
    FEW_ROWS,
    MANY_ROWS,
    ComputeLoad,
    candidates,
    why_unmeasured,
)
from moe_plugin.tuning.decisions import KeptDecision
from tests.experts.problems import parameters, problem

pytestmark = pytest.mark.fast

CPU = torch.device("cpu")
ALL = {"fused", "grouped", "batched", "loop", "kernels"}


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
    with pytest.raises(ValueError, match=r"experts.compute_selection='3' "):
        from_dict({"experts": {"compute_selection": 3}})


class Times:
    """Runs of candidates that take given seconds, with fewer rows less; the times arrive when
    `waits` is 0.
    """

    def __init__(self, seconds: dict[str, float], names: str = "ab") -> None:
        self.seconds, self.waits = seconds, 0
        self.started, self.ran, self.parts = 0, [], []
        self.names = names

    def __call__(self, part: int) -> dict[str, Any]:
        self.started += 1
        return {name: functools.partial(self.run, name, part) for name in self.names}

    def run(self, name: str, part: int) -> float:
        if name not in self.seconds:
            raise torch.OutOfMemoryError("full")
        self.ran.append(name)
        self.parts.append(part)
        return self.seconds[name] * (9 if self.ran.count(name) == 1 else 1) / part

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
           device: torch.device = CPU, calls: int = 4) -> auto.ComputeChoice:
    """The choice after some calls."""
    for _ in range(calls):
        found = known.choose(key, list(start.names if start else "ab"), device, start)
    return found


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("seconds,name", [
    ({"a": 1.0, "b": 0.5, "c": 0.7}, "b"),
    ({"a": 1.0, "b": 0.96}, "a"),
    ({"a": 1.0, "b": 0.94}, "b"),
    ({"b": 2.0, "c": 1.0}, "c"),
    ({"b": 1.0, "c": 0.96}, "b"),
    ({"a": 9.0, "b": 1.0}, "b"),
    ({"c": 9.0}, "c"),
    ({}, "a"),
])
def test_the_decision(seconds: dict[str, float], name: str, tmp_path: Path,
                      caplog: pytest.LogCaptureFixture) -> None:
    made = choose(MeasuredChoices(tmp_path), "key", Times(seconds, "abc"))
    assert made.name == name
    best = min(seconds.values(), default=0.0)
    assert all((show_time(s) in made.why) is (s < 3 * best) for s in seconds.values())
    for left_out in set("abc") - set(seconds):
        assert f"{left_out} cannot be measured: full" in caplog.text
        assert f"{left_out} not measured" in made.why
    assert made.why.startswith("measured: " if seconds else "no time was measured: ")


@pytest.mark.usefixtures("told")
def test_measured_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moe_plugin.tuning.compute_times")
    times, known = Times({"a": 2.0, "b": 1.0}), MeasuredChoices(tmp_path)
    assert [choose(known, "key", times).name for _ in range(3)] == ["b"] * 3
    assert len(times.ran) == 10  # in three calls
    assert choose(known, "other key", Times({"a": 1.0, "b": 2.0})).name == "a"
    again = MeasuredChoices(tmp_path)
    assert choose(again, "key", None) == choose(known, "key", None)
    assert {(key, kept.name, kept.spread)
            for key, kept in again.files.listed()} == {("key", "b", 0.0), ("other key", "a", 0.0)}
    assert choose(again, "key", None).why == "measured: a 2 s, b 1 s"
    assert len([r for r in caplog.records if "experts, key: b (measured" in r.getMessage()
                ]) == 1, "who restores it is silent"


@pytest.mark.usefixtures("told")
def test_a_call_runs_each_candidate_once_with_all_rows(tmp_path: Path) -> None:
    """Two rounds with few rows come first, and keep out what is far behind."""
    known, times = MeasuredChoices(tmp_path), Times({"a": 1.2, "b": 1.0, "c": 70.0}, "abc")
    names = [choose(known, "key", times, calls=1).name for _ in range(4)]
    assert names == ["a", "a", "b", "b"] and times.ran == [*"abcabc", *"ab" * 3]
    assert times.parts == [8] * 6 + [1] * 6


@pytest.mark.usefixtures("told")
def test_the_first_is_taken_while_a_device_is_busy(tmp_path: Path) -> None:
    times, known = Times({"a": 1.2, "b": 1.0}), MeasuredChoices(tmp_path)
    gpu = torch.device("cuda")
    assert choose(known, "key", None, gpu) == auto.ComputeChoice(
        "a", "not measured yet") and not times.started
    times.waits = 1
    assert choose(known, "key", times, gpu, 20).name == "a" and times.ran == ["a", "b"]
    times.waits = 0
    assert choose(known, "key", times, gpu, 6).name == "b" and times.ran == ["a", "b"] * 5


@pytest.mark.usefixtures("told")
def test_slow_rounds_leave_time_between_them(tmp_path: Path) -> None:
    now = [0.0]

    class Slow(Times):
        def run(self, name: str, part: int) -> float:
            now[0] += 10 / part
            return super().run(name, part)

    times, known = Slow({"a": 1.2, "b": 1.0}), MeasuredChoices(tmp_path, lambda: now[0])
    calls = []
    for _ in range(200):
        before = len(times.ran)
        choose(known, "key", times, calls=1)
        calls.append(len(times.ran) > before)
        now[0] += 1.0
    assert known.choose("key", list("ab"), CPU, None).name == "b"
    first, second = [i for i, tried in enumerate(calls) if tried][:2]
    assert first == 0 and second >= 4 * 20


@pytest.mark.usefixtures("told")
def test_a_file_from_a_bad_moment_heals(tmp_path: Path) -> None:
    """What one run measured while the machine was busy does not last for all later ones."""
    bad, key = MeasuredChoices(tmp_path), ("key", ("fused", "grouped"))
    seconds = {"fused": 74.4, "grouped": 0.0883}
    bad.files.put(key, KeptDecision("grouped", "measured: fused 1.24 min, grouped 88.3 ms", 0.1,
                                    seconds))
    times = Times({"fused": 0.05, "grouped": 0.06})
    times.names = ("fused", "grouped")
    assert choose(bad, "key", times).name == "grouped"
    assert choose(bad, "key", times, calls=30).name == "fused"
    assert choose(MeasuredChoices(tmp_path), "key", times, calls=1).name == "fused"
    [(_, kept)] = bad.files.listed()
    assert kept.name == "fused" and kept.seconds == {"fused": 0.05, "grouped": 0.06}


def test_files_without_a_spread_are_not_trusted(tmp_path: Path,
                                                caplog: pytest.LogCaptureFixture) -> None:
    """Those of earlier versions: they are neither used nor worth a warning."""
    files = ChoiceFiles(tmp_path)
    files.put(("key", ()), KeptDecision("grouped", "measured"))
    [path] = files.place().glob("*.json")
    path.write_text('{"key": "key", "name": "grouped", "why": "measured: fused 1.24 min"}')
    assert files.get(("key", ())) is None and files.listed() == [] and not caplog.records


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"key": "key"}', '{"key": "key", "name": 3, "why": ""}',
    '{"version": 2, "key": "key"}',
    '{"version": 2, "key": "key", "name": "b", "why": "", "spread": -1, "made": 0, "seconds": {}, '
    '"behind": {}}',
    '{"version": 2, "key": "key", "name": "b", "why": "", "spread": 0, "made": 0, "seconds": [], '
    '"behind": {}}',
    '{"version": 2, "key": "other", "name": "b", "why": "", "spread": 0, "made": 0, '
    '"seconds": {}, "behind": {}}',
])
def test_files_that_say_nothing_are_measured_again(tmp_path: Path, text: str) -> None:
    choose(MeasuredChoices(tmp_path), "key", Times({"a": 1.0, "b": 2.0}))
    path = next((tmp_path / "expert-compute").iterdir())
    path.write_text(text)
    times, again = Times({"a": 2.0, "b": 1.0}), MeasuredChoices(tmp_path)
    assert choose(again, "key", times).name == "b" and len(times.ran) == 10
    assert json.loads(path.read_text())["name"] == "b"


@pytest.mark.usefixtures("told")
def test_without_a_place_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr("moe_plugin.tuning.compute_times.user_cache", refuse)
    times, known = Times({"a": 2.0, "b": 1.0}), MeasuredChoices(tmp_path)
    assert [choose(known, "key", times).name for _ in range(2)] == ["b", "b"]
    assert len(times.ran) == 10 and known.files.listed() == []
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
    held = SharedChoices()
    held.choices = known
    monkeypatch.setattr(Workspace, "state", lambda memory, kind: held)
    monkeypatch.setattr(packages, "ChoiceFiles", lambda: known.files)
    return known


def layer_and_input(**experts: object) -> tuple[MoELayer, torch.Tensor]:
    torch.manual_seed(0)
    layer = MoELayer(16, LocalComm(), num_experts=4, experts={"hidden_dim": 24, **experts})
    return layer, torch.randn(33, 16, requires_grad=True)


@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
def test_measuring_changes_nothing(small_counts: MeasuredChoices, kind: str,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_and_input(kind=kind)
    before, state = {n: p.clone() for n, p in layer.named_parameters()}, torch.get_rng_state()
    trials = []
    monkeypatch.setattr(auto, "trial",
                        lambda *args, real=auto.trial: trials.append(real(*args)) or trials[-1])
    # a clock that shows the same for all, whatever else the machine does
    monkeypatch.setattr("moe_plugin.tuning.compute_times.timed",
                        lambda run, device: (run(), lambda: 1e-3)[1])
    first = torch.autograd.grad(layer(x).output.square().sum(), [x, *layer.parameters()])
    assert torch.equal(state, torch.get_rng_state()) and all(
        torch.equal(p, before[n]) for n, p in layer.named_parameters())
    assert all(p.grad is None for p in (x, *layer.parameters()))
    assert len(trials) == 2 and set(trials[0]) == {"fused", "grouped"}  # few rows, and all
    ruled, _ = layer_and_input(kind=kind, compute_selection="rule")
    ruled.load_state_dict(layer.state_dict())
    for mine, theirs in zip(
            first, torch.autograd.grad(ruled(x).output.square().sum(), [x, *ruled.parameters()]),
            strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for _ in range(30):
        layer(x)
    [(key, names)] = small_counts.tuner.entries
    assert names == ("fused", "grouped") and "float32 D16 F24 L4" in key
    assert small_counts.tuner.explored >= 4


def test_modules_share_what_one_measured(monkeypatch: pytest.MonkeyPatch,
                                         tmp_path: Path) -> None:
    """As long as one of them lives; then nothing is kept but in the user's cache."""
    trials: list[str] = []
    monkeypatch.setattr(auto, "SMALL_LAYER", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "trial", lambda load, *rest, real=auto.trial, **part:
                        trials.append(load.label) or real(load, *rest, **part))
    monkeypatch.setattr("moe_plugin.tuning.compute_times.timed",
                        lambda run, device: (run(), lambda: 1e-3)[1])
    (one, x), (two, _) = layer_and_input(), layer_and_input()
    one(x)
    made = len(trials)
    shared = one.experts.memory.state(SharedChoices).choices
    two(x)
    assert made == 2 and two.experts.memory.state(SharedChoices).choices is shared
    assert shared.files.place() == tmp_path / "moe-plugin" / "expert-compute"


def test_not_measured_where_no_gradient_is_wanted(small_counts: MeasuredChoices) -> None:
    layer, x = layer_and_input()
    with torch.no_grad():
        layer(x)
    with torch.inference_mode():
        layer(x)
    assert not small_counts.tuner.explored
    layer(x)
    assert small_counts.tuner.explored


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
    assert not small_counts.tuner.explored


def test_measuring_inside_recomputation_and_autocast(small_counts: MeasuredChoices) -> None:
    layer, x = layer_and_input()
    for reentrant in (False, True):
        y = torch.utils.checkpoint.checkpoint(lambda v: layer(v).output, x, use_reentrant=reentrant)
        y.sum().backward()
        small_counts.files.forget_all()
        small_counts.tuner.entries.clear()
    checkpoint(lambda v: layer(v).output, x).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x).output.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (x, *layer.parameters()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_repeats_the_choice(small_counts: MeasuredChoices, reentrant: bool,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Another choice has been kept meanwhile; its way would save other tensors for backward."""
    layer, x = layer_and_input(kind="gated_ffn")
    made, names = [], itertools.cycle(["fused", "grouped", "loop"])
    computed = auto.computed
    monkeypatch.setattr(MeasuredChoices, "choose",
                        lambda *_: auto.ComputeChoice(next(names), "the test says so"))
    monkeypatch.setattr(auto, "computed",
                        lambda name, *args: made.append(name) or computed(name, *args))
    for _ in range(2):
        torch.utils.checkpoint.checkpoint(lambda v: layer(v).output, x,
                                          use_reentrant=reentrant).sum().backward()
    assert made == ["fused", "fused", "grouped", "grouped"]


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
        later, hooked = LaterGrads(), list[torch.Tensor]()
        given = dataclasses.replace(parameters(p, "gelu"), later=later)
        for value in vars(given).values():
            if isinstance(value, torch.Tensor):
                value.requires_grad_().register_hook(hooked.append)
        runs = auto.trial(made, names, CPU, given)
        assert list(runs) == names
        for run in runs.values():
            run()
        later.compute({})  # a trial has left nothing for the layer's weights
        assert not hooked


def test_trials_run_without_the_modes_of_the_step() -> None:
    with torch.autocast("cpu"), torch.no_grad(), auto._clean(CPU):
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_the_doctor_lists_what_was_measured(small_counts: MeasuredChoices) -> None:
    assert packages.choice_rows() == []
    small_counts.files.put(("a CPU: 64 rows an expert, of fused grouped", ()), KeptDecision(
        "fused", "measured: fused 1 s, grouped 2 s", 0.07))
    [row] = packages.choice_rows()
    assert row["name"] in strategies and "rows an expert" in row["load"] and row["why"].startswith(
        "measured") and row["spread"] == "7 %" and row["age"].endswith("s")


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(("now", "measures"), [(9.0, False), (10.0, True)])
def test_measurements_go_on_when_the_pause_ends(now: float, measures: bool, tmp_path: Path) -> None:
    known, times = MeasuredChoices(tmp_path, lambda: now), Times({"a": 2.0, "b": 1.0})
    known._not_before = 10.0
    choose(known, "key", times)
    assert bool(times.ran) is measures
