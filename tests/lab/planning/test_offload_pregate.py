"""Pre-gated inference: the reference's tables, and what holds for every trace."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin.lab.planning.offload.pregate import (
    DESIGNS,
    SWITCH_BASE,
    SWITCH_LARGE,
    ExpertModel,
    Pass,
    compare,
    compare_text,
    one_token,
    schedule,
)
from moe_plugin.planner.units import show_time

pytestmark = pytest.mark.fast

MIB = 2**20


@pytest.mark.parametrize(("model", "milliseconds", "mebibytes"), [
    (SWITCH_BASE, ("4.32", "8.85", "580", "5.25"), (13_824, 18, 4_608, 36)),
    (SWITCH_LARGE, ("11.64", "27.75", "2063", "17.08"), (49_152, 32, 8_192, 64)),
])
def test_the_tables_of_the_reference(model: ExpertModel, milliseconds: tuple[str, ...],
                                     mebibytes: tuple[int, ...]) -> None:
    costs = compare(model, one_token(model))
    assert tuple(c.design for c in costs) == DESIGNS
    digits = (2, 2, 0, 2)
    assert tuple(f"{1e3 * c.seconds:.{n}f}"
                 for c, n in zip(costs, digits, strict=True)) == milliseconds
    assert tuple(c.buffer_bytes / MIB for c in costs) == mebibytes
    for cost in costs:
        assert show_time(cost.seconds) in compare_text(costs)


def test_a_fast_link_hides_all_but_the_first_copy() -> None:
    model = dataclasses.replace(SWITCH_BASE, bytes_s=1e11)
    resident, on_demand, _, pre_gated = compare(model, one_token(model, passes=3))
    copy = model.copy_s(1)
    assert pre_gated.seconds == pytest.approx(resident.seconds + copy)
    assert on_demand.seconds == pytest.approx(resident.seconds + model.layers * copy)


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
    with pytest.raises(ValueError, match="design 'both' must be one of resident"):
        schedule("both", SWITCH_BASE, [])
    with pytest.raises(ValueError, match="pass 0 has 1 layers, the model 6"):
        schedule("pre_gated", SWITCH_BASE, [[[0]]])
    with pytest.raises(ValueError, match="pass 0, layer 2: expert 128 must be from 0 to 127"):
        schedule("on_demand", SWITCH_BASE, [[[0], [1], [128], [], [], []]])
    with pytest.raises(ValueError, match="bytes_s=0 must be from 1"):
        dataclasses.replace(SWITCH_BASE, bytes_s=0)
    with pytest.raises(ValueError, match="'copy 0.1 expert 0' brings the device to 37748736 bytes"):
        schedule("pre_gated", SWITCH_BASE, one_token(SWITCH_BASE), limit=36 * MIB - 1).run()
