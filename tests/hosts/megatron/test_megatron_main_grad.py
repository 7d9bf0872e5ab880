"""`gradient_accumulation_fusion`: weight gradients are added to Megatron's buffers, and its
DistributedDataParallel takes them so.

Also:

* torch's fused Adam in Megatron, and apex's norms in the training script's model.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hosts.megatron.layers import Case, batch, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, argv_for, losses_of, ran

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


FUSED = "--moe-fused-adam"


def _train(argv: list[str]) -> tuple[list[dict[str, Any]], list[bool], list[torch.Tensor]]:
    """Records of a run, whether each Adam is fused at its end, and the expert weights."""
    from moe_plugin.experts.base import expert_parameters
    from moe_plugin.hosts.megatron.compat.optimizer import parts

    run = ran(argv)
    fused = [bool(group["fused"]) for part in parts(run.optimizer)
             if part.optimizer is not None for group in part.optimizer.param_groups]
    experts = [p.detach().float() for p in expert_parameters(run.model).values()]
    return run.steps_logged, fused, experts


@pytest.mark.parametrize("kind", [[], ["--use-distributed-optimizer"],
                                  ["--bf16", "--use-distributed-optimizer"]],
                         ids=["fp32", "sharded", "bf16 sharded"])
def test_steps_equal_those_of_adam_not_fused(kind: list[str], data: str) -> None:
    argv = argv_for(data, 8, *EP2, "--clip-grad", "0.8", "--weight-decay", "0.1", *kind)
    tolerance = {"rtol": 0, "atol": 2e-2 if "--bf16" in kind else 2e-4}
    for seen, wanted in zip(on_ranks(2, _train, [*argv, FUSED]), on_ranks(2, _train, argv),
                            strict=True):
        (mine, fused, my_experts), (theirs, plain, their_experts) = seen, wanted
        assert fused and all(fused) and not any(plain)
        assert theirs[0]["lm_loss"] - theirs[-1]["lm_loss"] > 0.1
        for name in ("lm_loss", "grad_norm"):
            torch.testing.assert_close(*(torch.tensor([r[name] for r in rows])
                                         for rows in (mine, theirs)), **tolerance)
        assert my_experts
        for got, want in zip(my_experts, their_experts, strict=True):
            torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("sharded", [[], ["--use-distributed-optimizer"]],
                         ids=["whole", "sharded"])
def test_a_run_resumes_with_the_other_adam(sharded: list[str], data: str, tmp_path: Path) -> None:
    argv = argv_for(data, 6, *EP2, *sharded)
    for name, first, second in (("a", [FUSED], []), ("b", [], [FUSED])):
        folder = str(tmp_path / name)
        on_ranks(2, _train, [*argv, *first, "--save", folder, "--save-interval", "3"])
        Path(folder, "latest_checkpointed_iteration.txt").write_text("3")
        log = f"{folder}/second.jsonl"
        for _, fused, _ in on_ranks(2, _train, [*argv, *second, "--load", folder, "--log-file",
                                                log]):
            assert all(fused) if second else not any(fused)
        whole, rest = losses_of(f"{folder}/log.jsonl"), losses_of(log)
        assert sorted(rest) == [4, 5, 6]
        assert rest == pytest.approx({step: whole[step] for step in rest}, abs=2e-4)


def _adam(*shapes: tuple[int, ...]) -> tuple[Any, list[torch.nn.Parameter]]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    return SimpleNamespace(optimizer=torch.optim.AdamW(parameters, lr=0.1)), parameters


def test_gradients_of_other_strides() -> None:
    """torch's kernel for CPUs would take them in the order of memory."""
    from moe_plugin.hosts.megatron.compat.optimizer import use_fused_adam

    results = []
    for fused in (False, True):
        optimizer, parameters = _adam((4, 6), (5,))
        use_fused_adam(optimizer, fused)
        for step in range(3):
            for p in parameters:
                generator = torch.Generator().manual_seed(step)
                p.grad = torch.randn(p.shape[::-1], generator=generator).permute(
                    *reversed(range(p.dim())))
            optimizer.optimizer.step()
        results.append(parameters)
    torch.testing.assert_close(*results)


def test_a_launched_script_fuses_its_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_plugin.hosts.megatron import launch, script

    parser = launch.extra_args_provider(argparse.ArgumentParser())
    optimizer, _ = _adam((2,))
    training = SimpleNamespace(setup_model_and_optimizer=lambda: ([], optimizer, None),
                               evaluate=lambda: None,
                               train_step=lambda: None)
    for name, module in (("", SimpleNamespace()), (".training", training),
                         (".global_vars", SimpleNamespace(_GLOBAL_ARGS=None))):
        monkeypatch.setitem(sys.modules, f"megatron.training{name}", module)
    monkeypatch.setattr(script.Script, "connect", lambda *_: None)
    script.observe_script()
    for argv, fused in (([FUSED], True), ([], None)):
        sys.modules["megatron.training.global_vars"]._GLOBAL_ARGS = parser.parse_args(argv)
        assert training.setup_model_and_optimizer()[1] is optimizer
        assert optimizer.optimizer.param_groups[0]["fused"] is fused


def test_sgd_is_not_fused() -> None:
    from moe_plugin.hosts.megatron.compat.optimizer import use_fused_adam

    sgd = SimpleNamespace(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    use_fused_adam(sgd, False)
    with pytest.raises(ValueError, match="--moe-fused-adam needs --optimizer adam"):
        use_fused_adam(sgd, True)


@pytest.mark.parametrize(("kind", "name"), [("LayerNorm", "FusedLayerNorm"),
                                            ("RMSNorm", "FusedRMSNorm")])
def test_norms_of_apex(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    from moe_plugin.hosts.megatron.compat.sequence_parts import LocalNorm

    def norm(**settings: Any) -> torch.nn.Module:
        config = SimpleNamespace(normalization=kind, sequence_parallel=True, **settings)
        made = LocalNorm(config, 8, eps=1e-3)
        assert all(p.sequence_parallel for p in made.parameters())
        return made

    x_TD, torchs = torch.randn(3, 8), norm()
    assert type(torchs) is getattr(torch.nn, kind)
    with pytest.raises(ValueError, match="needs apex or Transformer Engine"):
        norm(memory_efficient_layer_norm=True)
    calls = request.getfixturevalue("apex")
    found = norm()
    assert type(found) is getattr(importlib.import_module("apex.normalization"), name)
    torch.testing.assert_close(found(x_TD), torchs(x_TD))
    assert calls == [name] and norm(memory_efficient_layer_norm=True).memory_efficient
