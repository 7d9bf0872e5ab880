"""Layouts of one layer in Megatron's groups: every r, ranks that hold the same tokens, cut experts;
held to Megatron's own layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.exactness.spills import planned, random_planner
from tests.hosts.megatron.layers import Case, build, initialise_parallel, needs_padding_mask, run
from tests.hosts.megatron.ranks import on_ranks

AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
ONE_EXPERT = {"num_moe_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True}


def _worst(native: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    assert set(native) <= set(ours), (set(native), set(ours))
    return {
        name: float(
            (native[name] - ours[name]).abs().max() / native[name].abs().max().clamp(min=1e-6))
        for name in native if native[name] is not None
    }


def _against_native(case: Case, every: list[dict[str, Any]]) -> list[dict[str, float]]:
    """One rank: the largest relative difference of every result from Megatron's layer, for each of
    our settings. Experts are lent at random where the settings allow it.
    """
    initialise_parallel(case)
    native = run(build(case, False), case)
    with planned(random_planner(1)) as spilled:
        found = [_worst(native, run(build(case, True, settings), case)) for settings in every]
    assert bool(spilled) == any("parallel.spill" in settings for settings in every)
    return found


def _assert_equal(results: list[list[dict[str, float]]], every: list[dict[str, Any]],
                  limit: float = 5e-6) -> None:
    for index, settings in enumerate(every):
        worst = {name: max(rank[index][name] for rank in results) for name in results[0][index]}
        assert len(worst) >= 5 and max(worst.values()) < limit, (settings, worst)


LAYOUTS = {
    "EP2": (2, Case(ep=2, native=AUX), (0, 1)),
    "EP2, two replicas": (4, Case(ep=2, gated=True, native=AUX), (0, 1)),
    "EP2 TP2 ETP2": (4, Case(tp=2, ep=2, etp=2, sequence_parallel=True, native=AUX), (0, 1)),
    "EP2 ETP2, experts cut": (
        4, Case(ep=2, etp=2, gated=True, native={**AUX, "num_moe_experts": 2}), (0, 1, 2)),
    "ETP2, two replicas, one expert cut": (4, Case(etp=2, native={**AUX, **ONE_EXPERT}), (0, 1, 2)),
}


@pytest.mark.parametrize(("world", "case", "degrees"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_r_equals_native(world: int, case: Case, degrees: tuple[int, ...]) -> None:
    every = [{"parallel.r": r, "parallel.d": d} for r in degrees for d in ((1, 2) if r else (1,))]
    every += [{"dispatch.name": "padded", "dispatch.capacity_factor": 0.0, "parallel.r": r}
              for r in degrees]
    every += [{"parallel.spill": "least_loaded", "parallel.d": d} for d in (1, 2)]
    _assert_equal(on_ranks(world, _against_native, case, every), every)


CUT = {
    "ETP2, four experts": (2, Case(etp=2, native=AUX), 2),
    "EP2 ETP2": (4, Case(ep=2, etp=2, gated=True, native=AUX), 2),
    "EP2 TP2 ETP2": (4, Case(tp=2, ep=2, etp=2, sequence_parallel=True, native=AUX), 2),
    "ETP2, two replicas": (4, Case(etp=2, native=AUX), 2),
    "ETP4": (4, Case(etp=4, native=AUX), 4),
}


@pytest.mark.parametrize(("world", "case", "shards"), CUT.values(), ids=CUT.keys())
def test_several_experts_cut_as_megatron_cuts_them(world: int, case: Case, shards: int) -> None:
    every = [{"parallel.shards": shards, "parallel.r": r} for r in (None, 0, 1, 2)]
    every += [{
        "parallel.shards": shards, "dispatch.name": "padded", "dispatch.capacity_factor": 0.0,
        "parallel.d": 2
    }]
    _assert_equal(on_ranks(world, _against_native, case, every), every)


def _overlapped(settings: dict[str, Any]) -> list[str]:
    """What happens first in a call under Megatron's overlapped parameter gather."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from moe_plugin.experts.ffn import FFNExperts

    case, seen = Case(ep=torch.distributed.get_world_size()), []
    initialise_parallel(case)
    layer = build(case, True, settings)
    wrapper = DistributedDataParallelConfig(use_distributed_optimizer=True,
                                            overlap_grad_reduce=True, overlap_param_gather=True)
    wrapped = DistributedDataParallel(config=case.config(), ddp_config=wrapper, module=layer)
    for group in wrapped.expert_parallel_bucket_groups:
        group.finish_param_sync = lambda **_: seen.append("waited")
    for group in wrapped.bucket_groups:
        group.finish_param_sync = lambda **_: None
    original = FFNExperts.local_parameters
    FFNExperts.local_parameters = lambda self: seen.append("used") or original(self)
    with planned(random_planner(1)):
        wrapped(torch.randn(4, 2, 16))
    return seen


@pytest.mark.parametrize(("world", "settings"), [(2, {"parallel.r": 0}),
                                                 (2, {"parallel.spill": "everywhere"}), (2, {}),
                                                 (1, {})],
                         ids=["gathered", "borrowed", "rows travel", "one rank"])
def test_overlapped_parameter_gather_is_awaited(world: int, settings: dict[str, Any]) -> None:
    for seen in on_ranks(world, _overlapped, settings):
        assert seen[0] == "waited" and "used" in seen


PPMOE = {"dispatch.name": "index_slice"}
SLOTS = {"dispatch.name": "padded", "dispatch.capacity_factor": 0.0}
PARM = [
    {"parallel.replicas": 2, "parallel.schedule": "s1"},
    {**SLOTS, "parallel.replicas": 2, "parallel.schedule": "s1"},
    {**SLOTS, "parallel.replicas": 2, "parallel.schedule": "s2"},
    {**SLOTS, "parallel.replicas": 2},
]
BOTH = {**AUX, "moe_z_loss_coeff": 0.01}
SHARED = {
    "PPMoE and Parm, TP2 ETP2": (
        2, Case(tp=2, etp=2, native=BOTH),
        [PPMOE, {**PPMOE, "dispatch.capacity_factor": 0.0}, *PARM]),
    "folded: EP2 on the tensor-parallel ranks, gated, padding": (
        2, Case(tp=2, ep=2, etp=1, gated=True, padding=True, native=AUX), [PPMOE, *PARM]),
    "four experts cut": (
        2, Case(tp=2, etp=2, native=BOTH),
        [{**settings, "parallel.shards": 2} for settings in (PPMOE, *PARM)]),
    "one expert cut": (
        2, Case(tp=2, etp=2, native={**AUX, **ONE_EXPERT}),
        [PPMOE, *PARM, *({**PARM[0], "parallel.r": r} for r in (0, 1, 2))]),
    "two replicas": (4, Case(tp=2, etp=2, native=BOTH), [PPMOE, *PARM]),
    "Parm, TP2 EP2 ETP2": (
        4, Case(tp=2, ep=2, etp=2, gated=True, native=BOTH),
        [*PARM, {**PARM[0], "parallel.r": 0, "parallel.d": 1}, {**PARM[0], "parallel.d": 2}]),
    "Parm, TP2 EP4 ETP1": (4, Case(tp=2, ep=4, etp=1, native=BOTH), PARM),
    "Parm, TP2 EP2 ETP2, experts cut": (
        4, Case(tp=2, ep=2, etp=2, native={**BOTH, "num_moe_experts": 2}),
        [*PARM, {**PARM[0], "parallel.r": 1}]),
}


def _whole_tokens(case: Case,
                  every: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One rank: Megatron's layer under sequence parallelism; ours, with all tokens on every
    tensor-parallel rank, for each of the settings.
    """
    initialise_parallel(case)
    apart = replace(case, sequence_parallel=True)
    native = run(build(apart, False), apart)
    again = replace(
        case,
        native={**case.native, "recompute_granularity": "selective", "recompute_modules": ["moe"]})
    cases = [again if index == 0 else case for index in range(len(every))]
    return native, [
        run(build(c, True, settings), c) for c, settings in zip(cases, every, strict=True)
    ]


APART = {
    "PPMoE, TP2 ETP2": (
        2, Case(tp=2, etp=2, sequence_parallel=True, native=AUX),
        [PPMOE, {**PPMOE, "dispatch.capacity_factor": 0.0}]),
    "PPMoE, tokens dropped": (
        2, Case(tp=2, etp=2, sequence_parallel=True,
                native={**AUX, "moe_expert_capacity_factor": 0.6}), [PPMOE]),
    "PPMoE, experts cut": (
        2, Case(tp=2, etp=2, sequence_parallel=True, gated=True, native={**AUX, **ONE_EXPERT}),
        [PPMOE]),
    "PPMoE, folded, Megatron's router": (
        2, Case(tp=2, ep=2, etp=1, sequence_parallel=True,
                native={**AUX, "moe_router_dtype": "fp64"}), [PPMOE]),
    "all tokens gathered, EP2 TP2 ETP2": (
        4, Case(tp=2, ep=2, etp=2, sequence_parallel=True, padding=True, native=AUX),
        [{"dispatch.name": "all_gather"}]),
    "all tokens gathered, EP4": (
        4, Case(ep=4, gated=True, native=AUX), [{"dispatch.name": "all_gather"}]),
}


@pytest.mark.parametrize(("world", "case", "every"), APART.values(), ids=APART.keys())
def test_tokens_gathered_equal_native(world: int, case: Case, every: list[dict[str, Any]]) -> None:
    needs_padding_mask(case)
    _assert_equal(on_ranks(world, _against_native, case, every), every)


@pytest.mark.parametrize(("world", "case", "every"), SHARED.values(), ids=SHARED.keys())
def test_ranks_with_the_same_tokens_equal_native(world: int, case: Case,
                                                 every: list[dict[str, Any]]) -> None:
    needs_padding_mask(case)
    results = on_ranks(world, _whole_tokens, case, every)
    for rank, (_, ours) in enumerate(results):
        first = rank // case.tp * case.tp
        native = dict(results[rank][0])
        for name in ("output", "input gradient"):
            native[name] = torch.cat([results[first + i][0][name] for i in range(case.tp)])
        if "logged z_loss" in native:  # Megatron logs each rank's own tokens
            native["logged z_loss"] = sum(results[first + i][0]["logged z_loss"]
                                          for i in range(case.tp)) / case.tp
        for settings, found in zip(every, ours, strict=True):
            worst = _worst(native, found)
            assert len(worst) >= 6 and max(worst.values()) < 5e-6, (rank, settings, worst)


def _collectives(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """(what the call gives, what it did on any process group, by name)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    return result, dict(
        Counter(event.name for event in profile.events() if event.name.startswith("c10d::")))


def _counted(case: Case, settings: dict[str, Any] | None) -> list[dict[str, int]]:
    """Forward and backward of our layer; without settings: of Megatron's dense feed-forward layer.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.mlp import MLP

    initialise_parallel(case)
    if settings is None:
        dense = replace(
            case,
            native={"num_moe_experts": None, "moe_ffn_hidden_size": None,
                    "ffn_hidden_size": 24}).config()
        spec = get_gpt_layer_local_spec()  # from 0.18 on partials
        spec = spec.keywords["submodules"] if hasattr(spec, "keywords") else spec.submodules
        parts = spec.mlp.keywords if hasattr(spec.mlp, "keywords") else vars(spec.mlp)
        layer = MLP(dense, parts["submodules"])
    else:
        layer = build(case, True, settings)
    x = torch.randn(8, 3, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for _ in range(2):  # what is found out once, and compared in the second call of training
        layer(x)[0].sum().backward()
    (y, _), forward = _collectives(lambda: layer(x))
    return [forward, _collectives(y.sum().backward)[1]]


@pytest.mark.parametrize(
    "case", [Case(tp=2, etp=2, native=BOTH),
             Case(tp=2, etp=2, native={**AUX, **ONE_EXPERT})],
    ids=["whole experts", "an expert cut"])
def test_index_slice_sends_what_a_dense_layer_sends(case: Case) -> None:
    """One all-reduce a direction, nothing else; the counter sees what Parm sends."""
    once = [{"c10d::allreduce_": 1}] * 2
    for found in on_ranks(2, _counted, case, None) + on_ranks(2, _counted, case, PPMOE):
        assert found == once
    for forward, _ in on_ranks(2, _counted, case, PARM[2]):
        assert forward["c10d::_allgather_base_"] == 1 and sum(forward.values()) > 2


def test_index_slice_under_sequence_parallelism_sends_the_halves_of_an_all_reduce() -> None:
    """Forward also a single number, the longest rank's tokens, and the experts' ids. gloo's
    reduce-scatter is a ring of ours: one message between two ranks.
    """
    case = Case(tp=2, etp=2, sequence_parallel=True)  # losses have collectives of their own
    for forward, backward in on_ranks(2, _counted, case, PPMOE):
        assert forward == {
            "c10d::allreduce_": 1, "c10d::_allgather_base_": 2, "c10d::send": 1, "c10d::recv_": 1
        }
        assert backward == {"c10d::_allgather_base_": 1, "c10d::send": 1, "c10d::recv_": 1}


def _message(case: Case, settings: dict[str, Any]) -> str:
    initialise_parallel(case)
    try:
        build(case, True, settings)
    except ValueError as error:
        return str(error)
    return ""


TP2 = Case(tp=2, etp=2)
MISFITS = {
    "experts elsewhere": (4, Case(
        tp=2, ep=2, etp=2), PPMOE, ("'index_slice'", "[0, 1, 2, 3]", "tensor-parallel ranks [",
                                    "expert_tensor_parallel_size=2", "parallel.replicas=2 (Parm)")),
    "experts on a part": (2, Case(
        tp=2, etp=1), PPMOE, ("'index_slice'", "expert_tensor_parallel_size=2",
                              "nearest setting for these groups is dispatch.name='ragged'")),
    "native router": (2, replace(TP2, native={"moe_router_dtype": "fp64"}), PPMOE,
                      ("'index_slice'", "moe_router_dtype=fp64", "Leave that setting out")),
    "tuned": (2, TP2, {**PPMOE, "parallel.mode": "auto"}, ("'index_slice'", "'fixed'")),
    "overlap": (2, TP2, {**PPMOE, "parallel.d": 2},
                ("parallel.d=2", "'index_slice'", "Use 1")), "other replicas": (2, TP2, {
                    "parallel.replicas": 4
                }, ("parallel.replicas=4", "tensor_model_parallel_size=2",
                    "value is 2")), "replicas without tensor parallelism": (2, Case(ep=2), {
                        "parallel.replicas": 2
                    }, ("parallel.replicas=2", "tensor_model_parallel_size=1", "value is 1")),
    "replicas on a part": (2, Case(
        tp=2, etp=1), PARM[0], ("parallel.replicas=2", "a multiple of 2", "parallel.replicas=1")),
    "replicas and sequence parallel": (2, replace(
        TP2, sequence_parallel=True), PARM[0], ("parallel.replicas=2", "sequence_parallel=True")),
    "no slots to share": (2, TP2, {"parallel.replicas": 2, "parallel.schedule": "s2"},
                          ("parallel.schedule='s2'", "capacity_factor=none", "padded")),
}


@pytest.mark.parametrize(("world", "case", "settings", "parts"), MISFITS.values(),
                         ids=MISFITS.keys())
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(world: int, case: Case,
                                                                 settings: dict[str, Any],
                                                                 parts: tuple[str, ...]) -> None:
    for message in on_ranks(world, _message, case, settings):
        assert all(part in message for part in parts), message
