"""Trust in a prediction: corrections and spread by hand, doubts, files of measurements."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_plugin.cli.planning.advice import measured_lines
from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.measured import (
    ALL_GATHER,
    ALL_REDUCE,
    DENSE,
    HEAD,
    HOST,
    HOST_LAYERS,
    HOST_SEQUENCES,
    HOST_UPDATE,
    MATMUL,
    MOE,
    REDUCE_SCATTER,
    TENSOR,
    UPDATE,
    MeasuredNetwork,
    Processor,
    Timing,
    dump,
    load,
)
from moe_plugin.planner.model import ModelPlan
from moe_plugin.planner.model_search import search
from moe_plugin.planner.plan_cost import plan_cost
from moe_plugin.planner.trust import (
    EXCHANGES,
    MOE_EXCHANGE,
    MOE_LAYERS,
    OPTIMIZER,
    OWN,
    Estimate,
    Residuals,
    by_part,
    doubts,
    estimate,
    host_share,
    layer_of_rank,
    parts_of,
    rank,
    refuse,
    residuals,
)
from tests.planner.measurements import UPDATE_S, measurements
from tests.planner.problems import A100, cluster, model

pytestmark = pytest.mark.fast

PLAN = ModelPlan(tp=1, pp=1, dp=8, ep=8, etp=1, micro_batch=2, layout=LayoutChoice(r=1))
M, C = model(), cluster(2, 4)


def estimated(plan: ModelPlan, **factors: tuple[float, ...]) -> Estimate:
    names = {"moe": MOE, "dense": DENSE, "head": HEAD, "reduce": ALL_REDUCE,
             "tensor": TENSOR}
    network, processor = measurements(M, C, {names[k]: v for k, v in factors.items()})
    return estimate(M, plan_cost(M, C, A100, plan), residuals(network, processor),
                    processor.timings)


def test_a_file_without_matmuls_or_exchanges_is_described() -> None:
    """As one that was edited by hand has them."""
    network, processor = measurements(M, C)
    found = residuals(network, processor)
    lines = " ".join(measured_lines(network, processor, found))
    assert lines.count("the fit is off by 0% on average") == 2
    network = dataclasses.replace(network, timings=[t for t in network.timings
                                                    if t.name == ALL_REDUCE])
    processor = dataclasses.replace(processor, timings=processor.timings[-1:])
    lines = " ".join(measured_lines(network, processor, residuals(network, processor)))
    assert lines.count("nothing that was measured checks the fit") == 2


def test_measured_as_predicted_changes_nothing() -> None:
    made, cost = estimated(PLAN), plan_cost(M, C, A100, PLAN)
    update = made.parts.pop(OPTIMIZER)
    assert made.seconds == made.low == made.high == pytest.approx(cost.seconds)
    own = M.dense_parameters + M.expert_parameters / 8
    assert update == pytest.approx([UPDATE_S * own / 1e6] * 3)
    assert made.confidence() == "high" and made.confidence(doubted=True) == "low"


def test_each_part_is_corrected_by_its_measurement() -> None:
    cost, made = plan_cost(M, C, A100, PLAN), estimated(
        PLAN, moe=(3.0, 2.0, 2.5), dense=(1.5,), reduce=(0.5,))
    plain = parts_of(cost)
    assert plain[MOE_LAYERS] + plain[MOE_EXCHANGE] == pytest.approx(cost.time[MOE_LAYERS])
    assert 0 < plain[MOE_EXCHANGE] < cost.time[MOE_LAYERS]
    found = [seconds / plain[MOE_LAYERS] for seconds in made.parts[MOE_LAYERS]]
    assert found == pytest.approx([2.05, 2.5, 2.95])
    assert made.parts[MOE_EXCHANGE] == pytest.approx([plain[MOE_EXCHANGE]] * 3)
    for name, factor in (("attention", 1.5), ("dense FFN", 1.5), ("gradient reduction", 0.5)):
        assert made.parts[name] == pytest.approx([factor * cost.time[name]] * 3)
    assert made.low < made.seconds < made.high


def test_cut_layers_are_corrected_by_a_cut_layer() -> None:
    plan = dataclasses.replace(PLAN, tp=4, dp=2)
    cost, made = plan_cost(M, C, A100, plan), estimated(plan, tensor=(3.0,), dense=(1.5,),
                                                        reduce=(0.5,))
    for name in ("attention", "dense FFN", "tensor parallel"):
        assert made.parts[name] == pytest.approx([3 * cost.time[name]] * 3)
    assert made.parts["gradient reduction"][1] == pytest.approx(
        0.5 * cost.time["gradient reduction"])
    # files from before this was measured
    network, processor = measurements(M, C, {DENSE: (1.5,), ALL_REDUCE: (0.5,)})
    found = {kind: one for kind, one in residuals(network, processor).items() if kind != TENSOR}
    older = estimate(M, cost, found)
    assert older.parts["attention"][1] == pytest.approx(1.5 * cost.time["attention"])
    assert older.parts["tensor parallel"][1] == pytest.approx(0.5 * cost.time["tensor parallel"])


def test_the_bubble_follows_its_stages() -> None:
    plan = dataclasses.replace(PLAN, pp=2, dp=4, ep=4)
    cost, made = plan_cost(M, C, A100, plan), estimated(plan, moe=(2.0,), dense=(2.0,),
                                                        head=(2.0,))
    sent, bubble = cost.time["stage to stage"], "pipeline bubble"
    stages = sum(v for k, v in cost.time.items() if k not in (bubble, "gradient reduction"))
    share = cost.time[bubble] / stages
    alone = sent + parts_of(cost)[MOE_EXCHANGE]  # corrected by the exchanges, which are as fitted
    assert made.parts[bubble] == pytest.approx([share * (2 * (stages - alone) + alone)] * 3)


def test_confidence_falls_with_the_spread() -> None:
    cost, words = plan_cost(M, C, A100, PLAN), []
    for w in (1.05, 1.3, 3.0):
        found = residuals(*measurements(M, C, dict.fromkeys((MOE, DENSE, HEAD, ALL_REDUCE, *COSTS),
                                                            (1 / w, 1 / w, w, w))))
        made = estimate(M, cost, found)
        assert made.high / made.low == pytest.approx(w * w)
        words.append(made.confidence())
    assert words == ["high", "medium", "low"]


def test_plans_are_ranked_after_correction() -> None:
    found = search(M, C, A100, keep=1000).plans
    network, processor = measurements(M, C, {ALL_REDUCE: (40.0,)})
    ranked = rank(M, found, residuals(network, processor))
    assert [e.seconds for e in ranked] == sorted(e.seconds for e in ranked)
    # where gradients are dear, fewer of them are reduced
    assert ranked[0].cost.time["gradient reduction"] < found[0].time["gradient reduction"]


def why(factors: dict[str, tuple[float, ...]] | None = None, plan: ModelPlan = PLAN,
        m=M, c=C) -> list[str]:
    network, processor = measurements(M, C, factors)
    found = residuals(network, processor)
    made = estimate(m, plan_cost(m, c, A100, plan), found)
    return doubts(m, made, network, processor, found)


def test_nothing_to_doubt() -> None:
    assert why() == []
    refuse([])


@pytest.mark.parametrize("factors, text", [
    ({"linear": (2.0,), "2dh": (0.5,), "leader": (2.0,)}, "the fit of the network is off by"),
    ({MATMUL: (2.0,)}, "the fit of the processor is off by 50%"),
    ({MOE: (1.0, 50.0)}, "a factor of more than 3, mostly because of: MoE layers"),
    ({DENSE: (11.0,)}, "attention: measured over predicted time is 11.00, not within 0.1 to 10"),
])
def test_fits_that_are_far_off_are_doubted(factors: dict, text: str) -> None:
    found = why(factors)
    assert any(text in line for line in found), found
    with pytest.raises(ValueError, match="not to be trusted.*--fresh.*--trust-fit"):
        refuse(found)


def test_a_part_that_takes_little_time_is_not_doubted() -> None:
    small = dataclasses.replace(M, vocab=16)
    assert why({HEAD: (1.0, 20.0)}, m=small) == []
    assert why({HEAD: (1.0, 2000.0)}, m=small) != []


def test_sizes_far_outside_are_doubted() -> None:
    more = dataclasses.replace(PLAN, dp=32)
    assert why(plan=more, c=cluster(8, 4))[0] == "the plan is for 32 ranks, and 8 were measured"
    long = dataclasses.replace(M, sequence=32768)
    found = why(m=long)
    assert [line.split(":")[0] for line in found] == [EXCHANGES, MOE, DENSE][-len(found):]
    assert "65,536 tokens, and 1,024 tokens to 4,096 tokens were measured" in found[-1]
    cut = why(m=long, plan=dataclasses.replace(PLAN, tp=4, dp=2))
    assert cut[-1].startswith(f"{TENSOR}: the plan needs 65,536 tokens")
    wide = dataclasses.replace(M, vocab=3_000_000)
    assert [line.split(":")[0] for line in why(m=wide)] == [ALL_REDUCE]


def test_one_rank_has_no_network() -> None:
    m = model(experts=2)
    alone = ModelPlan(tp=1, pp=1, dp=1, ep=1, etp=1, micro_batch=1, layout=LayoutChoice(r=1))
    _, processor = measurements(m, cluster(1, 1))
    found = residuals(None, processor)
    assert set(found) == {MATMUL, MOE, DENSE, HEAD}
    made = estimate(m, plan_cost(m, cluster(1, 1), A100, alone), found)
    assert doubts(m, made, None, processor, found) == []
    assert OPTIMIZER not in made.parts and made.seconds > 0


def test_files(tmp_path: Path) -> None:
    network, processor = measurements(M, C, {MOE: (1.0, 2.0)}, ({"grid": "2x4"}, {}))
    for kind, record in ((MeasuredNetwork, network), (Processor, processor)):
        path = tmp_path / "record.json"
        path.write_text(dump(record))
        assert load(kind, path) == record


@pytest.mark.parametrize("values, text", [
    ('{"timings": []}', "0 timings must be 1 to"),
    ('{"timings": [{"name": "linear", "size": 0, "seconds": [1]}]}', "size=0"),
    ('{"timings": [{"name": "linear", "size": 1, "seconds": [.nan]}]}', "numbers > 0"),
    ('{"timings": [{"name": "linear", "size": 1, "seconds": []}]}', "at least one"),
    ('{"tymings": 1}', "unknown key 'tymings'"),
])
def test_bad_files_are_named(values: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    path.write_text(values)
    with pytest.raises(ValueError, match=text) as error:
        load(MeasuredNetwork, path)
    assert "network.json" in str(error.value)


def test_the_median_is_one_of_the_repeats() -> None:
    assert Timing(name=UPDATE, size=1, seconds=[3.0, 1.0, 2.0]).median == 2.0


def test_the_hosts_own_share_is_what_its_steps_take_beyond_the_parts() -> None:
    """With one layer and with two: each layer 3 ms more than its parts, and 5 ms besides."""
    network, processor = measurements(M, C)
    found, cluster = residuals(network, processor), network.cluster
    plan = dataclasses.replace(PLAN, micro_batch=HOST_SEQUENCES)
    assert host_share(network, processor, found) is None

    def predicted(layers: int) -> dict[str, list[float]]:
        small = dataclasses.replace(M, layers=layers, moe_every=1, global_batch=HOST_SEQUENCES * 8)
        return by_part(estimate(small, plan_cost(small, cluster, A100, plan), found,
                                processor.timings))

    own = [Timing(name=name, size=layers, seconds=[predicted(layers)[part][1] + more])
           for layers in HOST_LAYERS
           for name, part, more in ((HOST, "products", 5e-3 + 3e-3 * layers),
                                    (HOST_UPDATE, OPTIMIZER, 1e-3 * layers))]
    processor = dataclasses.replace(processor, timings=[*processor.timings, *own])
    share = host_share(network, processor, found)
    assert share is not None
    assert (share.layer_s, share.rest_s) == pytest.approx((3e-3, 5e-3))
    assert (share.update_layer_s, share.update_rest_s) == pytest.approx((1e-3, 0), abs=1e-12)
    plain, made = (estimate(M, plan_cost(M, C, A100, PLAN), found, processor.timings, host)
                   for host in (None, share))
    passes = PLAN.micro_batches(M) * PLAN.micro_batch / HOST_SEQUENCES
    assert made.parts[OWN] == pytest.approx([passes * (M.layers * 3e-3 + 5e-3)] * 3)
    assert made.parts[OPTIMIZER][1] == pytest.approx(plain.parts[OPTIMIZER][1] + M.layers * 1e-3)


def test_corrections_are_those_of_the_sizes_next_to_the_plan() -> None:
    found = Residuals({1.0: (1.0,), 4.0: (2.0,), 16.0: (4.0,)})
    assert [found.at(size).ratios for size in (None, 0.5, 4.0, 8.0, 99.0)] == [
        (1.0, 2.0, 4.0), (1.0,), (2.0,), (2.0, 4.0), (4.0,)]


def test_skew_lengthens_what_the_busiest_rank_does_and_no_check_of_one_rank() -> None:
    network, processor = measurements(M, C)
    skewed = dataclasses.replace(M, skew=2.0)
    even, found = (plan_cost(m, C, A100, PLAN) for m in (M, skewed))
    assert all(1 < b / a <= 2 for a, b in (
        (even.time[MOE_LAYERS], found.time[MOE_LAYERS]),
        (even.memory["MoE rows and gathered"], found.memory["MoE rows and gathered"])))
    assert layer_of_rank(skewed, 8) == layer_of_rank(M, 8)
    made = dataclasses.replace(PLAN, layout=LayoutChoice(r=0))
    assert plan_cost(skewed, C, A100, made).time == plan_cost(M, C, A100, made).time
    with pytest.raises(ValueError, match=f"model skew=99 does not fit experts={M.experts}"):
        dataclasses.replace(M, skew=99)


@pytest.mark.parametrize("layout", [LayoutChoice(r=0), LayoutChoice(r=1, gather_tokens=True)])
def test_what_is_gathered_is_corrected_by_collectives(layout: LayoutChoice) -> None:
    plan = dataclasses.replace(PLAN, layout=layout)
    cost = plan_cost(M, C, A100, plan)
    found = residuals(*measurements(M, C, {ALL_GATHER: (1.25,), REDUCE_SCATTER: (1.75,),
                                           ALL_REDUCE: (9.0,)}))
    assert len(found[ALL_GATHER].ratios) == 8  # of four sizes, both ways
    wanted = parts_of(cost)[MOE_EXCHANGE]
    assert estimate(M, cost, found).parts[MOE_EXCHANGE][1] == pytest.approx(1.5 * wanted)
