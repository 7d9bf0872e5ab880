"""`gradient_accumulation_fusion`: weight gradients are added to Megatron's buffers, and its
DistributedDataParallel takes them so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.layers import Case, batch, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks

pytestmark = pytest.mark.megatron
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CASES: dict[str, tuple[int, Case, dict[str, Any]]] = {
    "one rank": (1, Case(), {}),
    "one rank, recomputed": (1, Case(gated=True, native=RECOMPUTED), {}),
    "replicas (DP2)": (2, Case(), {}),
    "EP2": (2, Case(ep=2, gated=True), {}),
    "EP2, weights gathered": (2, Case(ep=2), {"parallel.r": 0}),
    "EP2 ETP2, experts cut": (4, Case(ep=2, etp=2, native={"num_moe_experts": 2}), {}),
}


def _main_grads(case: Case, settings: dict[str, Any],
                overlap: bool) -> list[list[tuple[str, Tensor, bool, Tensor]]]:
    """(name, main_grad, mark, bf16 weights after a step of SGD) of every parameter after three
    micro-batches: by hooks, and added by us.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    initialise_parallel(case)
    found = []
    for fused in (False, True):
        with_fusion = replace(case, native={**case.native, "gradient_accumulation_fusion": fused})
        layer = build(with_fusion, True, settings)
        wrapper = DistributedDataParallelConfig(grad_reduce_in_fp32=True,
                                                overlap_grad_reduce=overlap)
        ddp = DistributedDataParallel(config=layer.config, ddp_config=wrapper, module=layer)
        ddp.zero_grad_buffer()
        x, weigh, _ = batch(with_fusion)
        for number in range(3):
            with torch.enable_grad() if number == 2 else ddp.no_sync():
                ((ddp((x * (1 + number)).requires_grad_())[0].float() * weigh).sum() *
                 1024).backward()
        ddp.finish_grad_sync()
        assert all(p.grad is None for p in layer.parameters())
        found.append([(name, p.main_grad.clone(), p.grad_added_to_main_grad,
                       (p.detach().float() - 1e-4 / 1024 * p.main_grad).bfloat16())
                      for name, p in layer.named_parameters()])
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("overlap", [False, True],
                         ids=["reduced at the end", "reduced in backward"])
@pytest.mark.parametrize("name", CASES)
def test_main_grads_are_those_of_the_hooks(name: str, overlap: bool) -> None:
    world, case, settings = CASES[name]
    for plain, fused in on_ranks(world, _main_grads, replace(case, dtype=torch.bfloat16), settings,
                                 overlap):
        for (label, want, mark, stepped), (_, got, marked, mine) in zip(plain, fused, strict=True):
            assert want.dtype == torch.float32 and not mark and float(want.abs().max()) > 0, label
            assert marked == label.startswith("experts.w_"), label
            # the same bf16 products, added to the same fp32 buffer in the same order
            assert torch.equal(got, want) and torch.equal(
                mine, stepped), f"{label}: differs by up to {(got - want).abs().max()}"


def _compiled() -> tuple[Tensor, Tensor]:
    import torch._dynamo

    torch._dynamo.config.disable = False  # the ranks' processes start without it
    case, grads = Case(native={"gradient_accumulation_fusion": True}), []
    initialise_parallel(case)
    x = batch(case)[0]
    for compiled in (False, True):
        layer = build(case, True)
        for p in layer.parameters():
            p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False
        run = torch.compile(layer, backend="eager") if compiled else layer
        for _ in range(2):
            run(x)[0].square().sum().backward()
        grads.append(layer.experts.w_in_LDF.main_grad)
    return grads[0], grads[1]


def test_compiled_models_run_the_layer_outside_their_graphs() -> None:
    [(eager, compiled)] = on_ranks(1, _compiled)
    assert float(eager.abs().max()) > 0 and torch.equal(eager, compiled)


def _native_losses() -> list[tuple[Tensor, Tensor, dict[str, float]]]:
    """(gradient of the router, of the experts, logged losses): as it is, compiled."""
    import torch._dynamo

    from tests.hosts.megatron.layers import run

    torch._dynamo.config.disable = False  # the ranks' processes start without it
    case = Case(native={"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1,
                        "moe_z_loss_coeff": 0.01})
    initialise_parallel(case)
    found = []
    for compiled in (False, True):
        layer = build(case, True)
        if compiled:
            layer.forward = torch.compile(layer.forward, backend="eager")
        result = run(layer, case)
        found.append((result["router gradient"], result["w_in gradient"], {
            name: float(value.sum()) for name, value in result.items()
            if name.startswith("logged")}))
    return found


def test_megatrons_losses_are_the_same_in_a_compiled_model() -> None:
    [((router, experts, logged), (again, theirs, compiled))] = on_ranks(1, _native_losses)
    assert len(logged) == 2 and all(value > 0 for value in logged.values())
    assert compiled == pytest.approx(logged, rel=1e-6)
    torch.testing.assert_close(again, router)
    torch.testing.assert_close(theirs, experts)


def _tied(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Gradients of the experts that two layers share, and the sums of those of equal experts."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    initialise_parallel(case)
    found = []
    for tied in (True, False):
        first, second = build(case, True), build(case, True)
        if tied:
            second.experts = second.moe.experts = first.experts
        layers = torch.nn.ModuleList([first, second])
        ddp = DistributedDataParallel(first.config, DistributedDataParallelConfig(), layers)
        ddp.zero_grad_buffer()
        for number in range(2):
            x, weigh, _ = batch(case)
            with torch.enable_grad() if number == 1 else ddp.no_sync():
                x = (x * (1 + number)).requires_grad_()
                ((second(x + first(x)[0])[0]) * weigh).sum().backward()
        ddp.finish_grad_sync()
        grads = [[p.main_grad.clone() for p in layer.experts.parameters()] for layer in layers]
        found.append(grads[0] if tied else [a + b for a, b in zip(*grads, strict=True)])
    return list(zip(*found, strict=True))


@pytest.mark.parametrize(("world", "case"), [(2, Case(ep=2)), (4, Case(ep=2)), (2, Case(
    ep=2, native={"gradient_accumulation_fusion": True}))], ids=["EP2", "EP2 EDP2", "fused"])
def test_gradients_of_tied_experts_are_sums(world: int, case: Case) -> None:
    for pairs in on_ranks(world, _tied, case):
        assert pairs
        for got, wanted in pairs:
            assert got.any()
            torch.testing.assert_close(got, wanted)
