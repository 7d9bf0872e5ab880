"""torch's fused Adam in Megatron, and apex's norms in the training script's model."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, losses_of, ran

pytestmark = pytest.mark.megatron
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


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [[], ["--use-distributed-optimizer"],
                                  ["--bf16", "--use-distributed-optimizer"]],
                         ids=["fp32", "sharded", "bf16 sharded"])
def test_steps_equal_those_of_adam_not_fused(kind: list[str], data: str) -> None:
    argv = [*MODEL, *EP2, "--data-path", data, "--train-iters", "8", "--clip-grad", "0.8",
            "--weight-decay", "0.1", *kind]
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


@pytest.mark.distributed
@pytest.mark.parametrize("sharded", [[], ["--use-distributed-optimizer"]],
                         ids=["whole", "sharded"])
def test_a_run_resumes_with_the_other_adam(sharded: list[str], data: str, tmp_path: Path) -> None:
    argv = [*MODEL, *EP2, "--data-path", data, "--train-iters", "6", *sharded]
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
