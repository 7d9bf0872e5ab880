"""Findings: each rule speaks of a run made to have it, and of no other."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.cli.main import main
from moe_plugin.config import ObserveConfig, from_dict
from moe_plugin.config.flags import setting_specs
from moe_plugin.observe import StatsRecorder
from moe_plugin.observe.findings import RULES, findings
from moe_plugin.observe.history import (
    DecisionRecord,
    LayerRecord,
    RunRecord,
    SpanRecord,
    StepRecord,
    read_run,
)
from moe_plugin.observe.layer_rules import RECENT
from moe_plugin.observe.report.page import render
from moe_plugin.observe.sinks import KEPT, HealthLog

pytestmark = pytest.mark.fast

DATA = Path(__file__).parent / "data"
E, K, TOKENS = 8, 2, 100.0


def records(load: tuple[float, ...] = (25.0,) * E, count: int = 6, **other: Any) -> list:
    peak = max(load) * len(load) / sum(load)
    values = {"max_over_mean": peak, "drop_fraction": 0.0, "entropy": 1.5,
              "losses": {"switch": 1.0}, **other}
    return [LayerRecord(step=s, layer="a", load=load, tokens=TOKENS, **values)
            for s in range(1, count + 1)]


def run_of(layer: list[LayerRecord] | None = None, **other: Any) -> RunRecord:
    return RunRecord(name="r", host="megatron", layers={"a": records() if layer is None else layer},
                     **other)


def steps(losses: list[float], speed: float = 100.0) -> list[StepRecord]:
    return [StepRecord(step=s, loss=loss, tokens_per_s=speed)
            for s, loss in enumerate(losses, start=1)]


def spans(exchange: float, products: float, both: float) -> dict:
    return {(3, 0): [SpanRecord("exchange", "all_to_all", 0.0, exchange),
                     SpanRecord("matmuls", "mm", exchange - both, exchange - both + products)]}


def decisions(*events: str) -> list[LayerRecord]:
    made = [DecisionRecord(step=100 * i, layer="a", event=event) for i, event in enumerate(events)]
    layer = records()
    return [dataclasses.replace(layer[0], decisions=tuple(made)), *layer[1:],
            dataclasses.replace(layer[-1], step=300)]


SLOW = [*steps([3.0] * 30), *(dataclasses.replace(r, step=r.step + 30)
                              for r in steps([3.0] * 30, 60.0))]
MADE = {
    "not_finite": run_of(steps=steps([3.0, math.nan])),
    "collapse": run_of(records((95.0, 90.0, 5.0, 2.0, 2.0, 2.0, 2.0, 2.0))),
    "dead_experts": run_of(records((0.0, *(200 / 7,) * 7))),
    "drops": run_of(records(drop_fraction=0.2)),
    "no_balance": run_of(records((60.0, *(20.0,) * 7), losses={})),
    "uneven": run_of(records((60.0, *(20.0,) * 7))),
    "sure_router": run_of(records(entropy=0.01)),
    "spikes": run_of(steps=steps([*[3.0] * 25, 4.5, *[3.0] * 5])),
    "exchange_dominates": run_of(timelines=spans(8.0, 2.0, 0.0)),
    "waits_for_experts": run_of(records(calls=10.0, store={"stalls": 7.0, "hits": 1.0})),
    "undecided": run_of(decisions("explore", "explore", "settle", "explore")),
    "slower": run_of(steps=SLOW),
}
FINE = {
    "nothing": run_of(), "young": run_of(records((190.0, 10.0, *(0.0,) * 6), count=4)),
    "settled": run_of(decisions("explore", "explore", "explore", "settle")),
    "hidden": run_of(timelines=spans(8.0, 8.0, 6.0)),
    "falling": run_of(steps=steps([8 / (1 + s / 10) for s in range(100)])),
    "one expert a token": run_of(records((12.5,) * E, entropy=0.01)),
    "two of two": RunRecord(name="r", host="", layers={"a": records((50.0, 150.0), entropy=0.5)}),
}


def test_every_rule_has_a_run() -> None:
    assert set(MADE) == set(RULES)


@pytest.mark.parametrize("rule", MADE)
def test_a_rule_speaks_of_its_run_alone(rule: str) -> None:
    (found,) = findings(MADE[rule])
    first, last = found.steps or (0, -1)
    begin, end = MADE[rule].step_range
    assert found.steps == (3, 3) if rule == "exchange_dominates" else begin <= first <= last <= end
    assert found.rule == rule and found.meaning.endswith(".") and not found.remedy.endswith(".")
    assert findings(MADE[rule], skip=[rule]) == []


HOSTS = {"fairseq": "--moe-gate-loss-wt", "megatron": "--moe-aux-loss-coeff",
         "transformers": "router_aux_loss_coef", "pytorch": "losses.switch"}


@pytest.mark.parametrize("host", HOSTS)
def test_a_remedy_names_what_the_host_has(host: str) -> None:
    """One host's weight, and a flag only where there is a command line."""
    paths = {s.flag: s.path for s in setting_specs()}
    weighed, known = set(), {*(s.path for s in setting_specs()), "losses.switch", "losses.z"}
    for rule, made in MADE.items():
        for found in findings(dataclasses.replace(made, host=host)):
            assert "{" not in found.remedy
            named = {other for other, weight in HOSTS.items() if weight in found.remedy}
            assert named <= {host}, (rule, found.remedy)
            assert host in ("fairseq", "megatron") or "--moe" not in found.remedy, found.remedy
            # each is said as its setting where there is no command line
            for flag in re.findall(r"--moe-[a-z0-9-]+", found.remedy):
                if flag in paths and flag != "--moe-losses":
                    assert any(paths[flag] in other.remedy for other in findings(
                        dataclasses.replace(made, host="pytorch"))), flag
            settings = set(re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", found.remedy))
            assert host != "pytorch" or settings <= known
            weighed |= {rule} if named else set()
    assert weighed >= {"collapse", "dead_experts", "no_balance", "uneven"}


def test_an_unknown_host_is_told_the_weights_of_all() -> None:
    [found, *_] = findings(dataclasses.replace(MADE["no_balance"], host="unknown"))
    assert all(f"{host}: {weight}" in found.remedy for host, weight in HOSTS.items())


def test_findings_name_the_steps_that_they_are_about() -> None:
    found = {rule: findings(MADE[rule])[0].steps for rule in ("not_finite", "spikes", "slower")}
    assert found == {"not_finite": (2, 2), "spikes": (26, 26), "slower": (41, 60)}


@pytest.mark.parametrize("name", FINE)
def test_fine_runs_have_no_findings(name: str) -> None:
    assert findings(FINE[name]) == []


@pytest.mark.parametrize("host", ["fairseq", "megatron"])
def test_recorded_runs_are_read(host: str) -> None:
    assert all(f.rule in RULES for f in findings(read_run(DATA / host)))


numbers = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True),
                    st.floats(0, 1e30))


@given(st.lists(st.tuples(st.lists(st.floats(0, 1e30), max_size=4), numbers, numbers, numbers,
                          numbers), max_size=12), st.lists(numbers, max_size=60))
def test_no_numbers_break_the_rules(layer: list, losses: list) -> None:
    made = [LayerRecord(step=s, layer="a", load=tuple(load), tokens=tokens, max_over_mean=peak,
                        drop_fraction=drop, entropy=entropy)
            for s, (load, tokens, peak, drop, entropy) in enumerate(layer)]
    run = RunRecord(name="r", host="", layers={"a": made},
                    steps=[StepRecord(step=s, loss=loss, tokens_per_s=loss)
                           for s, loss in enumerate(losses)])
    for found in findings(run):
        assert found.title and "nan" not in found.title


def test_drops_are_found_in_the_log_alone_and_in_validation() -> None:
    training = [StepRecord(step=s, extra={"overflow_expert1": 10.0, "overflow_expert2": 30.0})
                for s in range(1, 7)]
    (found,) = findings(RunRecord(name="r", host="fairseq", steps=training))
    assert found.rule == "drops" and found.title.startswith("20 % of the choices are dropped")
    assert findings(RunRecord(name="r", host="fairseq", steps=training), skip=["drops"]) == []

    def validated(*percent: float) -> RunRecord:
        return run_of(steps=[StepRecord(step=10 * i, extra={"valid overflow_expert1": value})
                             for i, value in enumerate(percent, start=1)])

    (found,) = findings(validated(5.0, 56.0))
    assert found.title == "56 % of the choices are dropped in validation, at step 20"
    assert "--moe-capacity-factor none" in found.remedy
    assert findings(validated(56.0, 10.0)) == [] and "drops-valid" in render(validated(5.0, 56.0))


def test_the_report_begins_with_findings() -> None:
    page = render(MADE["collapse"])
    assert "Routing has collapsed in a: the busiest expert has 3.8 times the mean load" in page
    assert page.index("Routing has collapsed") < page.index('id="summary"')
    assert "Nothing stands out" in render(run_of())
    # a collapsed layer with fewer records than are judged together, and none
    for count, have in ((RECENT - 1, "a layer has at most 4"), (0, "there are none")):
        page = render(run_of(records((99.0,) + (0.1,) * (E - 1), count)))
        assert "Nothing stands out" not in page and "too few records of layers" in page
        assert f"{have}, and 5 are needed" in page
    page = render(run_of(records(count=RECENT), steps=steps([1.0] * 9 + [math.nan])))
    assert "too few" not in page and "Nothing stands out" not in page


def test_the_log_says_each_finding_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 8, "router": {"name": "topk"}}))
    with torch.no_grad():
        layer.router.weight_ED.zero_()  # equal scores: the first experts, always
    recorder = StatsRecorder(ObserveConfig(interval=1, jsonl=str(tmp_path / "stats.jsonl")))
    with caplog.at_level(logging.WARNING):
        for step in range(8):
            recorder.add("layer0", layer(torch.randn(64, 8)).stats)
            recorder.step(step)
    said = [r.getMessage() for r in caplog.records if "Remedy" in r.getMessage()]
    assert len(said) == 2 and "step 4: routing has collapsed in layer0" in said[0]
    assert "no token has chosen 6 experts" in said[1]
    assert main(["report", str(tmp_path)]) == 0
    assert "Routing has collapsed" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "stats.jsonl").read_text().splitlines()[-1])["step"] == 7


def test_a_balanced_layer_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(model_dim=32, num_experts=4))
    recorder = StatsRecorder(ObserveConfig(interval=1))
    for step in range(8):
        recorder.add("layer0", layer(torch.randn(512, 32)).stats)
        recorder.step(step)
    assert not [r for r in caplog.records if "Remedy" in r.getMessage()]


def test_plain_training_has_the_findings_of_its_report(caplog: pytest.LogCaptureFixture,
                                                       tmp_path: Path) -> None:
    # a copy takes 10 ms: most calls wait
    settings = {"model_dim": 8, "num_experts": 8, "router": {"name": "topk"},
                "experts": {"hidden_dim": 16, "compute": "loop", "store": "host", "cache": "4KiB",
                            "store_throttle": 0.1}}
    layer = MoELayer(from_dict(settings)).eval()
    path = tmp_path / "stats.jsonl"
    recorder = StatsRecorder(ObserveConfig(interval=1, jsonl=str(path)))
    with caplog.at_level(logging.WARNING):
        for step in range(50):
            if step < RECENT + 2:
                with torch.no_grad():
                    recorder.add("layer0", layer(torch.randn(1, 8)).stats)
            recorder.step(step)
            recorder.training(step, loss=9.0 if step == 25 else 3.0, not_finite=float(step == 10),
                              tokens_per_s=100.0 if step < 30 else 50.0)
    said = [r.getMessage() for r in caplog.records]
    wanted = {"not_finite", "spikes", "slower", "waits_for_experts"}
    for rule in wanted:
        assert sum(message.endswith(f"[{rule}]") for message in said) == 1, rule
    run = read_run(tmp_path)
    assert wanted <= {f.rule for f in findings(run)} and "Training" in render(run)
    assert [r.loss for r in run.steps][24:27] == [3.0, 9.0, 3.0]


def test_a_finding_that_comes_back_is_said_again_after_a_rest(
        caplog: pytest.LogCaptureFixture) -> None:
    log, said = HealthLog(), []
    with caplog.at_level(logging.WARNING):
        for step in range(5 * KEPT):
            bad = step in (1, 2, 4, 3 * KEPT)
            log.add_step(StepRecord(step=step, loss=math.nan if bad else 3.0, tokens_per_s=100.0))
            said += [(step, r.getMessage()[-12:]) for r in caplog.records]
            caplog.clear()
    assert said == [(1, "[not_finite]"), (3 * KEPT, "[not_finite]")]
    assert len(log.run.steps) <= KEPT


@given(st.lists(st.sampled_from([100.0, 90.0, 60.0, 40.0]), min_size=1, max_size=6))
def test_the_log_remembers_the_fastest_stretch(speeds: list[float]) -> None:
    made = [StepRecord(step=40 * i + j, loss=3.0, tokens_per_s=speed)
            for i, speed in enumerate([100.0, *speeds]) for j in range(40)]
    log = HealthLog()
    for record in made:
        log.add_step(record)
    whole = {f.rule for f in findings(RunRecord(name="r", host="", steps=made))}
    assert {f.rule for f in findings(log.run)} == whole


def test_an_unsettled_tuner_is_remembered_by_its_last_decisions() -> None:
    log = HealthLog()
    for step in range(0, 400, 10):
        event = "explore" if step in (0, 380) else "settle" if step == 20 else "predict"
        log.add(step, {"a": {"load": [1, 1], "decisions": [{"event": event}]}})
    assert [f.rule for f in findings(log.run)] == ["undecided"]
    (records,) = log.run.layers.values()
    assert len(records) == RECENT + 1 and records[0].step == 0
