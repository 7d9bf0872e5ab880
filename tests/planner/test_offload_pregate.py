"""Pre-gated inference: the reference's tables, and what holds for every trace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin.planner.cluster import Device
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.offload.pregate import (
    DESIGNS,
    ExpertModel,
    Pass,
    compare,
    expert_model,
    schedule,
)

pytestmark = pytest.mark.fast

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
