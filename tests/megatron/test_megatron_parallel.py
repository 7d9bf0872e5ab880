"""Layouts of one layer in Megatron's groups: every r, ranks that hold the same tokens, cut experts; held to Megatron's own layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.megatron.layers import Case, build, initialise_parallel, run
from tests.megatron.ranks import on_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
ONE_EXPERT = {"num_moe_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True}


def _worst(native: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    assert set(native) <= set(ours), (set(native), set(ours))
    return {name: float((native[name] - ours[name]).abs().max() / native[name].abs().max().clamp(min=1e-6))
            for name in native if native[name] is not None}


def _against_native(case: Case, every: list[dict[str, Any]]) -> list[dict[str, float]]:
    """One rank: the largest relative difference of every result from Megatron's layer, for each of our settings."""
    initialise_parallel(case)
    native = run(build(case, False), case)
    return [_worst(native, run(build(case, True, settings), case)) for settings in every]


def _assert_equal(results: list[list[dict[str, float]]], every: list[dict[str, Any]], limit: float = 5e-6) -> None:
    for index, settings in enumerate(every):
        worst = {name: max(rank[index][name] for rank in results) for name in results[0][index]}
        assert len(worst) >= 5 and max(worst.values()) < limit, (settings, worst)


LAYOUTS = {
    "EP2": (2, Case(ep=2, native=AUX), (0, 1)),
    "EP2, two replicas": (4, Case(ep=2, gated=True, native=AUX), (0, 1)),
    "EP2 TP2 ETP2": (4, Case(tp=2, ep=2, etp=2, sequence_parallel=True, native=AUX), (0, 1)),
    "EP2 ETP2, experts cut": (4, Case(ep=2, etp=2, gated=True, native={**AUX, "num_moe_experts": 2}), (0, 1, 2)),
    "ETP2, two replicas, one expert cut": (4, Case(etp=2, native={**AUX, **ONE_EXPERT}), (0, 1, 2)),
}


@pytest.mark.parametrize(("world", "case", "degrees"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_r_equals_native(world: int, case: Case, degrees: tuple[int, ...]) -> None:
    every = [{"parallel.r": r, "parallel.d": d} for r in degrees for d in ((1, 2) if r else (1,))]
    every += [{"dispatch.name": "padded", "dispatch.capacity_factor": 0.0, "parallel.r": r} for r in degrees]
    _assert_equal(on_ranks(world, _against_native, case, every), every)


def _overlapped(settings: dict[str, Any]) -> list[str]:
    """What happens first in a call under Megatron's overlapped parameter gather."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from moe_plugin.experts.ffn import FFNExperts

    case, seen = Case(ep=torch.distributed.get_world_size()), []
    initialise_parallel(case)
    layer = build(case, True, settings)
    wrapper = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    wrapped = DistributedDataParallel(config=case.config(), ddp_config=wrapper, module=layer)
    for group in wrapped.expert_parallel_bucket_groups:
        group.finish_param_sync = lambda **_: seen.append("waited")
    for group in wrapped.bucket_groups:
        group.finish_param_sync = lambda **_: None
    held = FFNExperts.stored
    FFNExperts.stored = lambda self: seen.append("used") or held(self)
    wrapped(torch.randn(4, 2, 16))
    return seen


@pytest.mark.parametrize(("world", "settings"), [(2, {"parallel.r": 0}), (2, {}), (1, {})], ids=["gathered", "rows travel", "one rank"])
def test_overlapped_parameter_gather_is_awaited(world: int, settings: dict[str, Any]) -> None:
    for seen in on_ranks(world, _overlapped, settings):
        assert seen[0] == "waited" and "used" in seen
