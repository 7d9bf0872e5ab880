"""Bounded dispatch: exact as soon as rows fit, never silently wrong where they do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.comm import Comm, LocalComm, Topology, run_simulated
from moe_plugin.comm.simulated import Traffic
from moe_plugin.config import MoEConfig, ObserveConfig, from_dict
from moe_plugin.dispatch.rows_limit import RowsLimit, RowsOverflow, overflowed
from moe_plugin.layer import MoELayer
from moe_plugin.observe import StatsRecorder
from moe_plugin.planner.choice import SENDS
from moe_plugin.records import DeviceCounts
from moe_plugin.training.resilience.skipped_steps import limits_of, until_rows_fit
from tests.distributed import run_gloo
from tests.exactness.harness import (
    RankResult,
    compare,
    config_of,
    loaded,
    naming,
    reference,
    run_layer,
    run_rank,
)
from tests.oracle import Case, dense, make_inputs, make_parameters
from tests.seeds import seeded

FACTORS = (0.3, 0.7, 1.0, 1.3, 1.7, 2.2, 3.0, 4.0)


def tight(case: Case, pieces: tuple[int, int], compute: str, send: str = "rows") -> list[str]:
    """Each factor: exact, or all outputs of all ranks with rows NaN and reported by every rank."""
    seen = []
    for factor in FACTORS:
        config = config_of(case, dispatch__name="bounded", dispatch__max_rows_factor=factor,
                           parallel__mode="fixed", parallel__d=pieces[0],
                           parallel__d_backward=pieces[1], experts__compute=compute,
                           dispatch__send=send)

        def rank(comm: Comm, config: MoEConfig = config) -> tuple[RankResult, bool]:
            layer = loaded(case, comm, config)
            result = run_layer(case, layer)
            return result, bool(limits_of([layer])[0].needed)

        topology = Topology.uniform(case.world, 2 if send == "nodes" else case.world)
        results, over = zip(*run_simulated(case.world, rank, topology=topology), strict=True)
        assert len(set(over)) == 1, "ranks disagree"
        seen.append("over" if over[0] else "exact")
        with naming(f"factor {factor}"):
            if over[0]:
                for result in results:
                    assert result.output.isnan().all() or not len(result.output)
            else:
                compare(case, results, reference(case))
    return seen


@pytest.mark.parametrize("compute", ["kernels", "grouped", "fused"])
@pytest.mark.parametrize("world, experts, skew, pieces", [
    (2, 2, 0.0, (1, 0)), (2, 8, 3.0, (3, 0)), (4, 8, 0.0, (1, 2)), (4, 4, 3.0, (4, 3)),
    (4, 2, 0.0, (2, 0))
])
def test_exact_as_soon_as_rows_fit(world: int, experts: int, skew: float, pieces: tuple[int, int],
                                   compute: str) -> None:
    case = Case(world, experts, 2, [6, 6, 5, 6][:world], None, None, skew=skew)
    seen = tight(case, pieces, compute)
    assert seen == sorted(seen, reverse=True), "a larger bound overflows where a smaller does not"
    assert {"over", "exact"} == set(seen)


@pytest.mark.parametrize("send,pieces", [("ranks", (1, 0)), ("ranks", (3, 2)), ("nodes", (1, 0)),
                                         ("nodes", (2, 0))])
@pytest.mark.parametrize("experts,k", [(8, 4), (2, 2)])
def test_once_is_exact_as_soon_as_rows_fit(send: str, pieces: tuple[int, int], experts: int,
                                           k: int) -> None:
    case = Case(4, experts, k, [6, 6, 5, 6], None, None, skew=3.0)
    seen = tight(case, pieces, "kernels", send)
    assert seen == sorted(seen, reverse=True) and {"over", "exact"} == set(seen)
    # what fits is what fits as rows
    assert seen == tight(case, (1, 0), "kernels")


def test_rows_sent_once_are_bounded_by_the_tokens_of_a_rank() -> None:
    """More tokens than were agreed on are found, though their choices fit; then there is room."""
    def rank(comm: Comm) -> list[Any]:
        config = from_dict({
            "model_dim": 8, "num_experts": 8, "router": {"top_k": 2}, "losses": {},
            "dispatch": {"name": "bounded", "send": "ranks", "on_overflow": "repeat"},
            "parallel": {"r": 1, "mode": "fixed"}})
        layer = MoELayer(config, comm)
        layer(torch.randn(6, 8))
        [limit] = limits_of([layer])
        bounds = limit.slots(torch.zeros(6, 2), layer.placement)
        alike = torch.ones(7, 8)  # of one expert each
        lost = layer(alike, top_k=1).output.isnan().all()
        found = [bounds, bool(lost), int(limit.needed), overflowed([limit], comm)]
        return [*found, bool(layer(alike, top_k=1).output.isfinite().all())]

    assert run_simulated(4, rank) == [[(12, 6), True, 13, True, True]] * 4


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize("experts,k,bound", [(8, 4, 2), (4, 4, 1), (2, 2, 1), (16, 3, 3)])
def test_a_token_has_no_more_rows_for_a_rank_than_its_experts(send: str, experts: int, k: int,
                                                              bound: int) -> None:
    """So many slots are made, and any load fits: also where all tokens choose the same experts."""
    case = Case(4, experts, k, [6, 3, 5, 6], None, None, skew=8.0)
    config = config_of(case, dispatch__name="bounded", dispatch__send=send,
                       parallel__mode="fixed")

    def rank(comm: Comm) -> tuple[RankResult, int, int]:
        layer = loaded(case, comm, config)
        result = run_layer(case, layer)
        [limit] = limits_of([layer])
        slots, _ = limit.slots(torch.zeros(6, k), layer.placement)
        rows = {"rows": 4 * slots, "ranks": 4 * min(6, slots), "nodes": 2 * min(6, 2 * slots)}
        assert result.stats["rows_sent"] == rows[send]  # slots, filled or not, half of them away
        assert result.stats["rows_between"] == rows[send] // 2
        return result, int(limit.needed), slots

    results, needed, slots = zip(*run_simulated(4, rank, topology=Topology.uniform(4, 2)),
                                 strict=True)
    assert set(needed) == {0} and set(slots) == {6 * bound}
    assert sum(max(result.stats["load"]) for result in results) == sum(case.tokens)  # it is skewed
    compare(case, list(results), reference(case))


def one_heavy_rank(on_overflow: str, factor: float = 1.0) -> tuple[Case, dict]:
    """Tokens of rank 1 alone all go to expert 0; the other rank has few."""
    case = Case(2, 2, 1, [4, 8], None, None, skew=0.0, seed=5)
    settings = {"dispatch__name": "bounded", "dispatch__max_rows_factor": factor,
                "dispatch__on_overflow": on_overflow, "dispatch__max_tokens": 8,
                "parallel__mode": "fixed"}
    return case, settings


def heavy_inputs(case: Case, weight_ED: Tensor) -> list[Tensor]:
    """Every token of rank 1 goes to expert 0, those of rank 0 one to each."""
    to_first = (weight_ED[0] - weight_ED[1]).double()
    xs = [x.clone() for x in make_inputs(case, torch.float64)[0]]
    xs[1] = xs[1] * 0.01 + to_first
    xs[0] = xs[0] * 0.01 + to_first * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    return xs


def heavy_layer(comm: Comm, on_overflow: str) -> tuple[Case, MoELayer, list[Tensor]]:
    case, settings = one_heavy_rank(on_overflow)
    layer = loaded(case, comm, config_of(case, **settings))
    return case, layer, heavy_inputs(case, layer.router.weight_ED.detach())


def _error_on_all(comm: Comm) -> str:
    case, layer, xs = heavy_layer(comm, "error")
    assert run_layer(case, layer, xs=xs).output.isnan().all()
    with pytest.raises(RowsOverflow, match="a rank had 8 rows.*max_rows_factor") as raised:
        overflowed(limits_of([layer]), comm)
    # reported once: the next step starts again
    assert not overflowed(limits_of([layer]), comm)
    return str(raised.value)


def test_overflow_on_one_rank_is_an_error_on_all() -> None:
    assert len(set(run_simulated(2, _error_on_all))) == 1


def test_a_layer_behind_one_whose_rows_did_not_fit_asks_for_nothing() -> None:
    """Its input is NaN, which is routed to the first experts: no load to make room for."""

    def rank(comm: Comm) -> list[int]:
        case, first, xs = heavy_layer(comm, "repeat")
        behind = loaded(case, comm, config_of(case, **one_heavy_rank("repeat")[1]))
        out = behind(first(xs[comm.rank]).output).output
        assert out.isnan().all()
        return [int(limit.needed) for limit in limits_of([first, behind])]

    assert run_simulated(2, rank) == [[8, 0], [8, 0]]


def test_one_token_that_is_nan_loses_no_other_tokens_rows() -> None:
    def rank(comm: Comm) -> tuple[int, bool]:
        _, layer, xs = heavy_layer(comm, "repeat")
        xs[comm.rank][0] = torch.nan
        out = layer(xs[comm.rank]).output
        return int(limits_of([layer])[0].needed), bool(out.isnan().all())

    needed, lost = zip(*run_simulated(2, rank), strict=True)
    assert min(needed) >= 7 and all(lost), "rows were dropped and nothing was said"


def _repeated(comm: Comm) -> tuple[int, RankResult]:
    """(repetitions of a first and a second step, the result of the second)."""
    case, layer, xs = heavy_layer(comm, "repeat")
    steps = []

    def step() -> RankResult:
        steps.append(len(steps))
        return run_layer(case, layer, xs=xs)

    until_rows_fit(layer, step, comm)
    result = until_rows_fit(layer, step, comm)
    return len(steps), result


def check_repeated(answers: list[tuple[int, RankResult]]) -> None:
    case, _ = one_heavy_rank("repeat")
    parameters = make_parameters(case, torch.float64)
    xs, masks = heavy_inputs(case, parameters["router"]), make_inputs(case, torch.float64)[1]
    assert [steps for steps, _ in answers] == [3, 3], "one repetition of the first step alone"
    compare(case, [result for _, result in answers], dense(case, parameters, xs, masks))


def test_a_step_is_repeated_with_a_larger_bound_on_all_ranks() -> None:
    check_repeated(run_simulated(2, _repeated))


def _in_processes() -> tuple[str, tuple[int, RankResult]]:
    from moe_plugin import TorchComm

    comm = TorchComm()
    comm.prepare()
    return _error_on_all(comm), _repeated(comm)


@pytest.mark.distributed
def test_both_between_processes() -> None:
    errors, repeated = zip(*run_gloo(2, _in_processes), strict=True)
    assert len(set(errors)) == 1
    check_repeated(list(repeated))


@pytest.mark.parametrize("tokens", [[0, 0], [0, 5], [5, 0]])
def test_ranks_without_tokens(tokens: list[int]) -> None:
    case = Case(2, 4, 2, tokens, None, None)
    config = config_of(case, dispatch__name="bounded", parallel__mode="fixed")
    compare(case, run_simulated(2, lambda comm: run_rank(case, comm, config)), reference(case))


def test_more_tokens_than_in_the_first_call_are_reported() -> None:
    config = from_dict({"model_dim": 8, "num_experts": 2, "router": {"top_k": 1},
                        "dispatch": {"name": "bounded"}, "parallel": "fixed"})

    def rank(comm: Comm) -> list[bool]:
        with seeded(0):
            layer = MoELayer(config, comm)
        seen = []
        for tokens in (4, 4, 40):
            y = layer(torch.randn(tokens, 8)).output
            seen += [bool(y.isnan().any()), overflow(layer, comm)]
        return seen

    def overflow(layer: MoELayer, comm: Comm) -> bool:
        try:
            return overflowed(limits_of([layer]), comm)
        except RowsOverflow:
            return True

    assert run_simulated(2, rank) == [[False, False, False, False, True, True]] * 2


@pytest.mark.parametrize("given, collectives", [(8, 0), (0, 1)])
def test_collectives_of_a_first_call(given: int, collectives: int) -> None:
    """With `max_tokens` the ranks agree on nothing."""
    traffic = Traffic()
    config = from_dict({"model_dim": 8, "num_experts": 2, "losses": {},
                        "dispatch": {"name": "bounded", "max_tokens": given},
                        "parallel": "fixed"})
    run_simulated(2, lambda comm: MoELayer(config, comm)(torch.randn(8, 8)) and None,
                  traffic=traffic)
    assert traffic.collectives.get("all_reduce", 0) == collectives


@pytest.mark.parametrize("settings, said", [
    ({"max_rows_factor": 2.0}, "max_rows_factor=2.0 cannot be used with dispatch.name='ragged'"),
    ({"max_tokens": 3, "name": "padded", "capacity_factor": 1.0}, "max_tokens=3 cannot be used"),
    ({"on_overflow": "repeat"}, "on_overflow='repeat' cannot be used with"),
    ({"name": "bounded", "max_rows_factor": 0.0}, "max_rows_factor"),
    ({"name": "bounded", "max_rows_factor": -1.0}, "max_rows_factor"),
])
def test_settings_that_do_not_fit(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MoELayer(from_dict({"model_dim": 8, "num_experts": 2, "dispatch": settings}), LocalComm())


def test_spilling_is_refused() -> None:
    config = from_dict({"model_dim": 8, "num_experts": 2, "dispatch": {"name": "bounded"},
                        "parallel": {"spill": "least_loaded"}})
    with pytest.raises(ValueError, match="parallel.spill='least_loaded'"):
        run_simulated(2, lambda comm: MoELayer(config, comm))


def test_counts_on_a_device_read_as_counts_of_the_whole_buffer() -> None:
    counts = DeviceCounts(torch.tensor([3, 0, 2]), 8)
    assert counts.host == [3, 0, 5] and counts.lengths() == [3, 0, 2]
    assert (counts.total, counts.number, counts.even, int(counts.real)) == (8, 3, False, 5)
    assert "DeviceCounts" in repr(counts) and dataclasses.is_dataclass(counts)


def balanced(xs: list[Tensor]) -> list[Tensor]:
    """The tokens of both ranks go to both experts evenly."""
    return [x.abs() * 0 + sign[:, None] * xs[1][:1] for x, sign in (
        (x, torch.tensor([1.0, -1.0]).repeat(len(x) // 2).double()) for x in xs)]


def test_evaluation_reports_its_own_overflow() -> None:
    """As an error; what was not asked for is not blamed on the step that follows."""
    def rank(comm: Comm) -> None:
        case, layer, xs = heavy_layer(comm, "error")
        x = xs[comm.rank]
        with torch.no_grad():
            with pytest.raises(RowsOverflow, match="a rank had 8 rows"):
                until_rows_fit(layer, lambda: layer(x).output, comm)
            assert layer(x).output.isnan().all()
        result = until_rows_fit(layer, lambda: run_layer(case, layer, xs=balanced(xs)), comm)
        assert result.output.isfinite().all()

    run_simulated(2, rank)


def test_evaluation_is_repeated_and_keeps_gradients() -> None:
    def rank(comm: Comm) -> None:
        _, layer, xs = heavy_layer(comm, "repeat")
        layer.router.weight_ED.grad = torch.ones_like(layer.router.weight_ED)
        with torch.no_grad():
            y = until_rows_fit(layer, lambda: layer(xs[comm.rank]).output, comm)
        assert y.isfinite().all() and layer.router.weight_ED.grad is not None

    run_simulated(2, rank)


def test_a_call_without_tokens_or_gradients_settles_no_bound() -> None:
    config = from_dict({"model_dim": 8, "num_experts": 2, "router": {"top_k": 1},
                        "dispatch": {"name": "bounded"}, "parallel": "fixed"})

    def rank(comm: Comm) -> tuple[int | None, ...]:
        with seeded(0):
            layer, settled = MoELayer(config, comm), []
        for tokens, grad in ((0, True), (3, False), (5, False), (7, True), (4, False)):
            with torch.set_grad_enabled(grad):
                assert layer(torch.randn(tokens, 8)).output.isfinite().all()
            assert not overflowed(limits_of([layer]), comm)
            settled.append(layer.routed_experts.layouts.limit.choices)
        return tuple(settled)

    assert run_simulated(2, rank) == [(None, None, None, 7, 7)] * 2


@pytest.mark.parametrize("repeats", [False, True])
def test_a_rank_without_bounded_layers_takes_part(repeats: bool) -> None:
    config = from_dict({"model_dim": 8, "num_experts": 2, "dispatch": {
        "name": "bounded", "on_overflow": "repeat" if repeats else "error"}})

    def rank(comm: Comm) -> int:
        model = MoELayer(config, LocalComm()) if comm.rank else torch.nn.Linear(2, 2)
        steps = []

        def step() -> None:
            steps.append(len(steps))
            if repeats and len(steps) == 1:  # rows of one rank did not fit
                for limit in limits_of([model]):
                    limit.record(torch.tensor(9), 4)

        until_rows_fit(model, step, comm)
        return len(steps)

    assert run_simulated(2, rank) == [1 + repeats] * 2


def test_statistics_of_a_discarded_step_are_not_recorded() -> None:
    config = from_dict({"model_dim": 8, "num_experts": 2, "router": {"top_k": 1},
                        "dispatch": {"name": "bounded", "on_overflow": "repeat"}})

    def rank(comm: Comm) -> list[tuple[int, int]]:
        with seeded(0):
            layer = MoELayer(config, comm)
        recorder, records = StatsRecorder(ObserveConfig(), comm), []

        def step(tokens: int) -> None:
            out = layer(torch.randn(tokens, 8))
            recorder.add("a", out.stats)
            out.output.sum().backward()
            runs.append(tokens)

        for tokens in (4, 400):  # the second does not fit into a bound set by the first
            runs: list[int] = []
            until_rows_fit(layer, lambda tokens=tokens: step(tokens), comm)
            record = recorder.reduce()["a"]
            records.append((len(runs), record["calls"], record["tokens"]))
        return records

    assert run_simulated(2, rank) == [[(1, 2, 8), (2, 2, 800)]] * 2


def test_ranks_agree_on_a_model_once_in_each_group() -> None:
    """The group keeps what they agreed on: one of equal name and size later on asks again."""
    config = from_dict({"model_dim": 8, "num_experts": 2, "dispatch": {"name": "bounded"}})
    models = [MoELayer(config, LocalComm()) for _ in range(2)]

    def rank(comm: Comm) -> list[int]:
        asked = []
        all_reduce, model = comm.all_reduce, models[comm.rank]
        comm.all_reduce = lambda *args: asked.append(1) or all_reduce(*args)
        numbers = []
        for _ in range(2):
            until_rows_fit(model, lambda: None, comm)
            numbers.append(len(asked))
        return numbers

    for _ in range(2):
        assert run_simulated(2, rank) == [[2, 3]] * 2  # once whether, and each time after a step


def test_inference_mode_first_and_another_device() -> None:
    def rank(comm: Comm) -> None:
        _, layer, xs = heavy_layer(comm, "repeat")
        with torch.inference_mode():
            layer(xs[comm.rank])
        assert overflowed(limits_of([layer]), comm)
        layer(xs[comm.rank]).output.sum().backward()
        assert not overflowed(limits_of([layer]), comm)

    run_simulated(2, rank)
    limit = RowsLimit(from_dict({"model_dim": 8, "num_experts": 2,
                                 "dispatch": {"name": "bounded"}}))
    for device in ("cpu", "meta"):
        limit.record(torch.zeros((), dtype=torch.int64, device=device), 4)
        assert limit.needed.device.type == device


def test_what_a_bound_records_follows_the_parameters() -> None:
    """Before a call: one that is compiled would be compiled again for another object."""
    layer = MoELayer(8, LocalComm(), num_experts=2, dispatch={"name": "bounded"})
    limit = layer.routed_experts.layouts.limit
    assert limit.needed.device.type == "cpu"
    assert layer.to("meta").routed_experts.layouts.limit.needed.device.type == "meta"
