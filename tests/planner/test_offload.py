"""Offloading a model's blocks: schedules, profiles, pre-gated inference, peers that stream."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin.planner.cluster import Device
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.offload.peers import Peers, versus_pipeline
from moe_plugin.planner.offload.pregate import (
    DESIGNS,
    ExpertModel,
    Pass,
    compare,
    expert_model,
    schedule,
)
from moe_plugin.planner.offload.schedule import (
    STREAMS,
    BlockProfile,
    ModelProfile,
    OffloadSchedule,
    OffloadStep,
    load_profile,
)
from moe_plugin.planner.offload.weight_streaming import Layer, plan

pytestmark = pytest.mark.fast


# Offload schedules: streams, stalls, an exact ledger of memory.


def test_a_schedule_by_hand() -> None:
    steps = (
        OffloadStep("in a", "in", 2.0, takes=10, block="a"),
        OffloadStep("in b", "in", 3.0, takes=20, block="b"),
        OffloadStep("a", "compute", 1.0, ("in a",), takes=5, frees=15, block="a"),
        OffloadStep("b", "compute", 1.0, ("in b",), takes=5, block="b"),
        OffloadStep("out b", "out", 4.0, ("b",), frees=25, block="b"),
    )
    outcome = OffloadSchedule(steps, limit=135, base=100).run()
    assert outcome.seconds == 10.0
    assert outcome.stalls == {"a": 2.0, "b": 2.0} and outcome.stall_s == 4.0
    assert outcome.memory == ((0.0, 100), (0.0, 110), (2.0, 130), (2.0, 135), (3.0, 120),
                              (5.0, 125), (10.0, 100))
    assert (outcome.peak, outcome.peak_step) == (135, "a")
    assert (outcome.moved_in, outcome.moved_out) == (30, 25)
    assert outcome.occupancy == 0.2
    assert outcome.started["b"] == 5.0 and outcome.ended["b"] == 6.0
    events = json.loads(json.dumps(outcome.trace()))["traceEvents"]
    assert {e["ph"] for e in events} == {"X", "M", "C"}
    with pytest.raises(ValueError, match="step 'a' raises .* to 135 bytes.*limit of 134"):
        OffloadSchedule(steps, limit=134, base=100).run()


def test_what_ends_frees_before_what_starts_takes() -> None:
    steps = (OffloadStep("a", "compute", 1.0, takes=8, frees=8),
             OffloadStep("none", "compute", 0.0, ("a",), takes=8, frees=8),
             OffloadStep("b", "in", 1.0, ("none",), takes=8))
    assert OffloadSchedule(steps, limit=8).run().peak == 8


def test_one_queue_of_copies_takes_turns() -> None:
    steps = (OffloadStep("in", "in", 2.0, takes=8), OffloadStep("out", "out", 3.0),
             OffloadStep("again", "in", 1.0))
    assert OffloadSchedule(steps).run().seconds == 3.0
    assert OffloadSchedule(steps, duplex=False).run().seconds == 6.0


@pytest.mark.parametrize(("make", "match"), [
    (lambda: OffloadStep("a", "side", 1.0),
     "stream 'side' is unknown. Choose from compute, in, out"),
    (lambda: OffloadStep("a", "in", float("inf")), "seconds=inf must be a finite number"),
    (lambda: OffloadStep("a", "in", 1.0, takes=-1), "takes=-1"),
    (lambda: OffloadSchedule((OffloadStep("a", "out", 1.0, frees=3),)).run(),
     "'a' frees 3 bytes, which is 3 more"),
    (lambda: OffloadSchedule((), limit=1, base=2).run(), "the resident memory .* 2 bytes"),
    (lambda: OffloadSchedule((OffloadStep("a", "in", 1.0, ("b",)),)).run(), "issued before: .'b'."),
])
def test_bad_schedules_are_refused(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[OffloadStep, ...]:
    """Random steps with times that often coincide; each frees what it takes, or all at the end."""
    steps: list[OffloadStep] = []
    for index in range(draw(st.integers(0, 12))):
        names = [s.name for s in steps]
        after = tuple(draw(st.sets(st.sampled_from(names), max_size=3))) if names else ()
        takes = draw(st.integers(0, 5))
        steps.append(OffloadStep(str(index), draw(st.sampled_from(STREAMS)),
                                 draw(st.integers(0, 3)),
                                 after, takes, draw(st.sampled_from((0, takes)))))
    return tuple(steps)


@given(schedules())
def test_the_ledger_equals_a_count_at_every_instant(steps: tuple[OffloadStep, ...]) -> None:
    outcome = OffloadSchedule(steps, base=7).run()
    assert outcome.stall_s + outcome.timeline.busy("compute") == max(
        (s.end for s in outcome.timeline.spans if s.task.resource == "compute"), default=0)
    spans = dict(zip((s.name for s in steps), outcome.timeline.spans, strict=True))
    for time in (0.5 + n for n in range(40)):  # ends and starts are whole numbers
        held = 7 + sum(s.takes for s in steps if spans[s.name].start < time)
        held -= sum(s.frees for s in steps if spans[s.name].end < time)
        last = [size for at, size in outcome.memory if at < time][-1]
        assert held == last <= outcome.peak
    assert outcome.peak == max(size for _, size in outcome.memory)


# Pre-gated inference: the reference's tables, and what holds for every trace.


MIB = 2**20
DATA = Path(__file__).parents[2] / "docs/benchmarks/data/offload.json"
# Decoders of Switch Transformers in fp32 over 25 GB/s (PCIe 4), one token at a time. The times of
# attention and experts are assumptions, not measurements: their sums, 0.72 and 0.97 ms per layer,
# give 4.32 and 11.64 ms per token where all is resident. How a sum is divided changes only
# prefetch_all, by less than a layer.
SWITCH_BASE = ExpertModel(layers=6, experts=128, expert_bytes=18_874_368, attention_s=5e-5,
                          expert_s=67e-5)
SWITCH_LARGE = ExpertModel(layers=12, experts=128, expert_bytes=33_554_432, attention_s=5e-5,
                           expert_s=92e-5)


def one_token(model: ExpertModel, passes: int = 1) -> list[Pass]:
    """Passes in which one expert of each layer is active."""
    return [[[0]] * model.layers] * passes


@pytest.mark.parametrize(("model", "milliseconds", "mebibytes"), [
    (SWITCH_BASE, ("4.32", "8.85", "580", "5.25"), (13_824, 18, 4_608, 36)),
    (SWITCH_LARGE, ("11.64", "27.75", "2063", "17.08"), (49_152, 32, 8_192, 64)),
])
def test_the_tables_of_the_reference(model: ExpertModel, milliseconds: tuple[str, ...],
                                     mebibytes: tuple[int, ...]) -> None:
    costs = compare(model, one_token(model))
    assert [c.design for c in costs] == list(DESIGNS)
    digits = (2, 2, 0, 2)
    assert tuple(f"{1e3 * c.seconds:.{n}f}"
                 for c, n in zip(costs, digits, strict=True)) == milliseconds
    assert tuple(c.buffer_bytes / MIB for c in costs) == mebibytes


def test_a_fast_link_hides_all_but_the_first_copy() -> None:
    model = dataclasses.replace(SWITCH_BASE, bytes_s=1e11)
    resident, on_demand, _, pre_gated = compare(model, one_token(model, passes=3))
    copy = model.copy_s(1)
    assert pre_gated.seconds == pytest.approx(resident.seconds + copy)
    assert on_demand.seconds == pytest.approx(resident.seconds + model.layers * copy)


def test_the_measured_model() -> None:
    """Text from disk at 2,500 MB/s, eight blocks of 160 experts: by the resident seconds."""
    rows = {row["mode"]: row for row in json.loads(DATA.read_text())["rows"]}
    seconds = {mode: sum(row["seconds"]) / len(row["seconds"]) for mode, row in rows.items()}
    copied = rows["on demand"]["counters"]["misses"] / 16 / 8  # experts by layer
    assert copied == pytest.approx(3.5, rel=0.02)
    each = seconds["resident"] / 8
    model = ExpertModel(layers=8, experts=160, expert_bytes=4 * MIB, bytes_s=2.5e9,
                        attention_s=each / 10, expert_s=0.9 * each / 3.5)
    found = {c.design: c.seconds for c in compare(model, [[[0, 1, 2, 3], [0, 1, 2]] * 4])}
    assert found["on_demand"] == pytest.approx(seconds["on demand"], rel=0.1)
    assert found["pre_gated"] == pytest.approx(seconds["pre-gated"], rel=0.15)


def test_a_model_file_as_a_pass() -> None:
    switch = ModelShape(layers=12, model_dim=768, ffn_dim=3072, heads=12, vocab=32128, sequence=10,
                        experts=128, top_k=1, element_bytes=4)
    device = Device(flops=1e13, memory_bytes_s=1e12, launch_s=0)
    model, active = expert_model(switch, device, 25_000_000_000, 1)
    assert (model.layers, model.experts, model.expert_bytes) == (6, 128, 18_874_368)
    assert active == [[0]] * 6  # bound by reading each weight once
    assert model.expert_s == pytest.approx(18_874_368 / 1e12)
    read = model.base_bytes
    assert read == 4 * (switch.dense_parameters + 2 * 12 * 10 * 768)
    assert 6 * model.attention_s == pytest.approx(read / 1e12)
    many, active = expert_model(switch, device, 25_000_000_000, 128)
    assert len(active[0]) == round(128 * (1 - (127 / 128)**128)) == 81
    assert many.expert_s == model.expert_s  # 1.6 rows an expert are still bound by its weights
    assert many.base_bytes - read == 4 * 127 * 2 * 12 * 10 * 768


@st.composite
def traces(draw: st.DrawFn) -> tuple[ExpertModel, list[Pass]]:
    """A model, and the active experts of some passes; layers without any, too."""
    layers, experts = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    model = ExpertModel(
        layers=layers, experts=experts, expert_bytes=draw(st.integers(1, 9)), base_bytes=11,
        attention_s=draw(st.floats(0, 3)), expert_s=draw(st.floats(0, 3)),
        bytes_s=draw(st.floats(1, 9)))
    layer = st.sets(st.integers(0, experts - 1)).map(sorted)
    a_pass = st.lists(layer, min_size=layers, max_size=layers)
    return model, draw(st.lists(a_pass, min_size=1, max_size=3))


@given(traces())
def test_pre_gated_on_every_trace(trace: tuple[ExpertModel, list[Pass]]) -> None:
    model, passes = trace
    plan = schedule("pre_gated", model, passes)
    outcome = plan.run()
    most = max(len(experts) for active in passes for experts in active)
    assert outcome.peak - model.base_bytes <= 2 * most * model.expert_bytes
    assert outcome.memory[-1][1] == model.base_bytes
    copies = [s for s in plan.steps if s.stream == "in"]
    needed = {f"copy {n}.{layer} expert {e}" for n, active in enumerate(passes)
              for layer, experts in enumerate(active) for e in experts}
    assert {s.name for s in copies} == needed and len(copies) == len(needed)
    for copy in copies:  # complete before its layer computes, begun in the layer before
        number, layer = map(int, copy.block.split("."))
        assert outcome.ended[copy.name] <= outcome.started[f"experts {copy.block}"]
        decided = outcome.ended[f"attention {number}.{max(0, layer - 1)}"]
        assert outcome.started[copy.name] >= decided
    fetched = schedule("on_demand", model, passes).run()
    resident = schedule("resident", model, passes).run()
    assert resident.seconds <= outcome.seconds <= fetched.seconds * (1 + 1e-9)
    assert fetched.peak - model.base_bytes == most * model.expert_bytes
    whole = schedule("prefetch_all", model, passes).run()
    assert whole.peak - model.base_bytes <= 2 * model.experts * model.expert_bytes


def test_wrong_traces_are_refused() -> None:
    with pytest.raises(ValueError, match="design 'both' is unknown. Choose from resident"):
        schedule("both", SWITCH_BASE, [])
    with pytest.raises(ValueError, match="pass 0 has 1 layers, but the model has 6"):
        schedule("pre_gated", SWITCH_BASE, [[[0]]])
    with pytest.raises(ValueError, match="pass 0, layer 2: expert 128 must be from 0 to 127"):
        schedule("on_demand", SWITCH_BASE, [[[0], [1], [128], [], [], []]])
    with pytest.raises(ValueError, match="bytes_s=0 must be from 1"):
        dataclasses.replace(SWITCH_BASE, bytes_s=0)
    with pytest.raises(ValueError, match="'copy 0.1 expert 0' raises .* to 37748736 bytes"):
        schedule("pre_gated", SWITCH_BASE, one_token(SWITCH_BASE), limit=36 * MIB - 1).run()


# Peers that stream a model against a pipeline of them, over poor links.


# A GPT of 24 layers of width 2,048 (1.2B parameters) in 16 bits, sequences of 2,048 tokens one at a
# time, on 50 TFLOP/s, 12 GB/s from host memory and 11 GiB.
PARAMETERS, TOKENS = 12 * 2048**2, 2048
FORWARD = (2 * PARAMETERS * TOKENS + 4 * TOKENS**2 * 2048) / 50e12
LAYERS = [Layer(name=str(j), forward_s=FORWARD, backward_s=3 * FORWARD,
                load_s=2 * PARAMETERS / 12e9, out_s=2 * PARAMETERS / 12e9,
                weight_bytes=2 * PARAMETERS, gradient_bytes=2 * PARAMETERS,
                kept_bytes=2 * TOKENS * 2048, workspace_bytes=34 * TOKENS * 2048)
          for j in range(24)]
# 4 peers; each accumulates 8 micro-batches, and weights are averaged every 500 steps
PLAN = plan(LAYERS, 8, 11 * 2**30, 2**28)
PEERS = Peers(count=4, bytes_s=10e6 / 8, delay_s=0.01, average_every=500,
              averaged_bytes=24 * 2 * PARAMETERS)
RATES = [10**n for n in range(10, 5, -1)]  # bit/s


def test_a_point_of_twenty_times() -> None:
    assert PLAN.hides and PLAN.outcome.peak <= 11 * 2**30
    versus = versus_pipeline(PLAN, PEERS)  # 10 Mbit/s
    assert versus.ratio > 25
    assert versus.streamed > PLAN.seconds


def test_the_ratio_grows_as_the_bandwidth_falls() -> None:
    for peers in (PEERS, replace(PEERS, averaged_bytes=0)):
        ratios = [versus_pipeline(PLAN, replace(peers, bytes_s=rate / 8)).ratio for rate in RATES]
        assert ratios == sorted(ratios)
        # a fast network favours the pipeline, which computes no forward again: they cross
        assert ratios[0] < 1 < ratios[1]
    often = replace(PEERS, average_every=1)  # costs more than a pipeline's activations
    assert versus_pipeline(PLAN, often).ratio < 1


def test_bad_peers_are_refused() -> None:
    for change, match in (({"count": 1}, "count=1 must be from 2"),
                          ({"bytes_s": 0.0}, "bytes_s=0.0 must be"),
                          ({"average_every": 0}, "average_every=0")):
        with pytest.raises(ValueError, match=match):
            replace(PEERS, **change)
    with pytest.raises(ValueError, match="25 stages needs at least as many layers, .* 24"):
        versus_pipeline(PLAN, replace(PEERS, count=25))


# Profiles of a model's blocks: files there and back, bad values by name.


PROFILE = ModelProfile(
    name="two", base_bytes=10**9, in_bytes_s=2e9, out_bytes_s=1e9, duplex=False, blocks=[
        BlockProfile(name="0", forward_s=1e-5, backward_s=0.25, activation_bytes=100,
                     kept_bytes=10, parameter_bytes=7, gradient_bytes=7, workspace_bytes=3),
        BlockProfile(name="1", forward_s=2.0, backward_s=3.0)])


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    assert load_profile(PROFILE.save(tmp_path / "p.json")) == PROFILE
    assert isinstance(load_profile(tmp_path / "p.json").blocks[0], BlockProfile)
    assert PROFILE.compute_s == pytest.approx(5.25001)


@pytest.mark.parametrize(("change", "match"), [
    ({"blocks": []}, "has 0 blocks; it must have from 1"),
    ({"blocks": [{"name": "a", "forward_s": 1}]}, "backward_s"),
    ({"blocks": [{"name": "a", "forward_s": -1, "backward_s": 1}]}, "'a': forward_s=-1.0 must be"),
    ({"blocks": [{"name": "a", "forward_s": float("nan"), "backward_s": 1}]}, "forward_s=nan"),
    ({"blocks": [{"name": "a", "forward_s": 1, "backward_s": 1, "kept_bytes": 2}]},
     "kept_bytes=2 must be at most activation_bytes=0"),
    ({"blocks": [{"name": "a", "forward_s": 1, "backward_s": 1}] * 2}, "'a' occurs twice"),
    ({"in_bytes_s": -1}, "in_bytes_s=-1.0 must be from 0"),
    ({"speed": 1}, "unknown key 'speed'"),
])
def test_bad_profiles_are_refused_by_name(tmp_path: Path, change: dict, match: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps(asdict(PROFILE) | change))
    with pytest.raises(ValueError, match=match):
        load_profile(tmp_path / "p.json")


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[1]"):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(ValueError, match="profile file"):
            load_profile(tmp_path / "p.json")
    with pytest.raises(ValueError, match="profile file .* cannot be read"):
        load_profile(tmp_path / "none.json")
