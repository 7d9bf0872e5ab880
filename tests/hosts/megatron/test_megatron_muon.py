"""Megatron's Muon with our stacks of experts: each expert's matrix gets the update that Megatron
makes of its own layer's, whose experts are matrices.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.experts.matrices import from_matrices, mark_matrices, part_of, to_matrices
from tests.hosts.megatron.layers import Case, batch, build, initialise_parallel, whole_gradients
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.stand_in_muon import use
from tests.hosts.megatron.training import EP2, argv_for, own_loop, ran, refusal

pytestmark = [own_loop, pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.optimizer.emerging_optimizers") is None,
    reason="needs Megatron's Muon of megatron-core 0.18 or newer")]
MUON: dict[str, Any] = {"optimizer": "muon", "lr": 0.05, "weight_decay": 0.1, "clip_grad": 0.0,
                        "muon_scale_mode": "shape_scaling", "muon_fp32_matmul_prec": "highest",
                        "muon_tp_mode": "blockwise"}


def _wrapped(case: Case, ours: bool, given: dict[str, Any]) -> tuple[Any, Any]:
    """A layer in Megatron's data-parallel module, and Megatron's optimizer of it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.training.training import wrap_model_chunks_with_ddp

    given = dict(given)
    layout = given.pop("layout", True)
    chosen = OptimizerConfig(**{**MUON, **given})
    [wrapped] = wrap_model_chunks_with_ddp(
        [build(case, ours)], case.config(), DistributedDataParallelConfig(),
        use_layer_wise_distributed_optimizer=chosen.use_layer_wise_distributed_optimizer,
        use_layer_wise_param_layout=layout, DP=DistributedDataParallel)
    return wrapped, get_megatron_optimizer(chosen, [wrapped])


def _steps(case: Case, ours: bool, given: dict[str, Any]) -> list[torch.Tensor]:
    """The layer's whole weights after three steps, each on the same batch."""
    initialise_parallel(case)
    wrapped, optimizer = _wrapped(case, ours, given)
    x, weigh, _ = batch(case)
    for _ in range(3):
        wrapped.zero_grad_buffer()
        (wrapped(x)[0].float() * weigh).sum().backward()
        wrapped.finish_grad_sync()
        done, _, _ = optimizer.step()
        assert done
    found = whole_gradients(wrapped.module, case, of=lambda p: p.detach())
    return [each for each in dataclasses.astuple(found) if each is not None]


def _both(case: Case, given: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    native, ours = (_steps(case, flag, given) for flag in (False, True))
    assert len(native) == len(ours) == (4 if case.gated else 3)
    return list(zip(native, ours, strict=True))


LAYER_WISE = {"use_layer_wise_distributed_optimizer": True, "bf16": True}
BF16 = torch.bfloat16
CASES = {
    "EP2, gated": (Case(ep=2, gated=True), {}),
    "EP2, plain, by spectrum": (Case(ep=2), {"muon_scale_mode": "spectral",
                                             "muon_nesterov": True}),
    "ETP2, blockwise": (Case(tp=2, etp=2, sequence_parallel=True, gated=True,
                             native={"num_moe_experts": 1, "moe_router_topk": 1,
                                     "moe_router_pre_softmax": True}), {}),
    "two replicas, layer-wise": (Case(gated=True, dtype=BF16), LAYER_WISE),
    "EP2, layer-wise": (Case(ep=2, gated=True, dtype=BF16), LAYER_WISE),
}


def _all() -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    use()
    return {name: _both(*case) for name, case in CASES.items()}


def test_steps_are_megatrons() -> None:
    """Gradients in bf16 differ in their last bits, and orthogonalization makes small ones large."""
    for name, found in on_ranks(2, _all)[0].items():
        for native, ours in found:
            off = float((ours - native).norm() / native.norm())
            assert off < (0.02 if CASES[name][0].dtype == BF16 else 1e-5), (name, off)


def _decayed(ours: bool, optimizer_name: str) -> list[set[float]]:
    """What becomes of experts' biases, and of their weights, that are all 1, in a step without
    gradients.
    """
    case = Case(native={"add_bias_linear": True})
    initialise_parallel(case)
    wrapped, optimizer = _wrapped(case, ours, {"optimizer": optimizer_name})
    experts = {name: p for name, p in wrapped.module.named_parameters() if ".experts." in f".{name}"
               and ".shared_experts." not in name}
    for parameter in experts.values():
        parameter.data.fill_(1.0)
    for group in optimizer.param_groups:  # as Megatron's scheduler sets it
        group["weight_decay"] = MUON["weight_decay"] * group["wd_mult"]
    wrapped.zero_grad_buffer()
    optimizer.step()
    found: list[set[float]] = [set(), set()]
    for name, parameter in experts.items():
        weight = "bias" not in name.rpartition("experts.")[2]
        found[weight].update(parameter.detach().flatten().tolist())
    return found


def _decayed_by_both() -> list[list[list[set[float]]]]:
    use()
    return [[_decayed(ours, name) for ours in (False, True)] for name in ("adam", "muon")]


def test_biases_of_experts_have_no_weight_decay() -> None:
    for native, ours in on_ranks(1, _decayed_by_both)[0]:
        assert ours == native
        biases, weights = ours
        assert biases == {1.0} and list(weights) == [pytest.approx(1 - 0.05 * 0.1)]


def _losses(argv: list[str]) -> dict[int, float]:
    use()
    return {row["iteration"]: row["lm_loss"] for row in ran(argv).steps_logged}


@pytest.mark.parametrize("more", [[], ["--use-distributed-optimizer", "--bf16"]],
                         ids=["fp32", "layer-wise"])
def test_a_whole_run_takes_megatrons_steps_and_resumes(data: str, tmp_path: Path,
                                                       more: list[str]) -> None:
    """From one checkpoint of Megatron's own layers, ours and theirs; and again from the middle."""
    argv = argv_for(data, 5, *EP2, "--swiglu", "--optimizer", "muon", "--weight-decay", "0.1",
                    "--lr-decay-style", "constant", *more, "--save-interval", "1")
    begin, plain = str(tmp_path / "native"), ["--no-load-optim", "--no-load-rng"]
    on_ranks(2, _losses, [*argv, "--native-moe", "--save", begin, "--exit-interval", "1"])
    native = on_ranks(2, _losses, [*argv, "--native-moe", "--load", begin, *plain])[0]
    ours = on_ranks(2, _losses, [*argv, "--load", begin, *plain, "--save", str(tmp_path / "ours")])
    assert native[5] < native[2] - 0.1
    # in bf16 orthogonalization makes the last bits of small gradients large
    assert ours[0] == {step: pytest.approx(loss, abs=0.02 if more else 1e-5)
                       for step, loss in native.items()}
    (tmp_path / "ours/latest_checkpointed_iteration.txt").write_text("3")
    again = on_ranks(2, _losses, [*argv, "--load", str(tmp_path / "ours")])[0]
    assert again == {step: pytest.approx(ours[0][step], abs=1e-6) for step in (4, 5)}


def _chosen(ours: bool) -> list[set[tuple[float, ...]]]:
    """What Megatron's optimizer chooses for experts' biases, and for their weights, in a model of
    twice the base's width: factor of weight decay, highest rate of learning, eps.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import (
        OptimizerConfig,
        get_megatron_optimizer,
        get_mup_config_overrides,
        get_standard_config_overrides,
    )

    case = Case(native={"add_bias_linear": True})
    initialise_parallel(case)
    layer = build(case, ours)
    wrapped = DistributedDataParallel(case.config(), DistributedDataParallelConfig(), layer)
    config = OptimizerConfig(optimizer="adam", lr=0.5, min_lr=0.1, weight_decay=0.1, adam_eps=1e-8)
    optimizer = get_megatron_optimizer(config, [wrapped], config_overrides={
        **get_standard_config_overrides(config), **get_mup_config_overrides(config, 2.0)})
    of = {id(p): (group["wd_mult"], group["max_lr"], group.get("eps"))
          for group in optimizer.param_groups for p in group["params"]}
    found: list[set[tuple[float, ...]]] = [set(), set()]
    for name, parameter in layer.experts.named_parameters():
        found["bias" not in name].add(of[id(parameter)])
    return found


def _chosen_by_both() -> list[list[set[tuple[float, ...]]]]:
    return [_chosen(ours) for ours in (False, True)]


def test_rates_by_width_take_biases_of_experts_for_vectors() -> None:
    [(native, ours)] = on_ranks(1, _chosen_by_both)
    assert ours == native
    [(bias, weight)] = zip(*ours, strict=True)
    assert bias[:2] == (0.0, 0.5) and weight == (1.0, 0.25, 5e-9)


def _refusals() -> list[str]:
    use()
    case, said = Case(ep=1, gated=True), []
    initialise_parallel(case)
    for given in ({"optimizer": "soap"}, {"optimizer": "adaptive_muon"},
                  {**LAYER_WISE, "layout": False}):
        with pytest.raises(ValueError, match="use|leave out") as caught:
            _wrapped(case, True, given)
        said.append(str(caught.value))
    return said


def test_what_would_not_see_the_matrices_is_refused() -> None:
    soap, adaptive, shared = on_ranks(2, _refusals)[0]
    assert "optimizer='soap'" in soap and "optimizer='adaptive_muon'" in adaptive
    assert "--no-use-layer-wise-param-layout" in shared


@pytest.mark.skipif(importlib.util.find_spec("emerging_optimizers") is not None,
                    reason="its package is installed")
def test_muon_without_its_package_is_refused_with_what_helps(data: str) -> None:
    [said] = on_ranks(1, refusal, argv_for(data, 1, "--optimizer", "muon"))
    assert said.startswith("--optimizer muon needs") and "pip install emerging-opt" in said


@pytest.mark.fast
def test_matrices_of_stacks() -> None:
    """Gates above the others, [out, in]; each back in its place."""
    gate, up = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    matrices = to_matrices([gate, up])
    assert [tuple(each.shape) for each in matrices] == [(10, 3)] * 2
    assert torch.equal(matrices[1][:5], gate[1].t()) and torch.equal(matrices[1][5:], up[1].t())
    assert all(map(torch.equal, from_matrices(matrices, [gate, up]), [gate, up]))


@pytest.mark.fast
def test_parts_of_matrices_are_marked() -> None:
    from moe_plugin import MoELayer
    from moe_plugin.config import from_dict

    experts = MoELayer(from_dict({"model_dim": 4, "num_experts": 2,
                                  "experts": {"kind": "gated_ffn"}})).experts
    mark_matrices(experts, 1)
    found = {name: part_of(p) for name, p in experts.named_parameters()}
    assert found["w_gate_LDF"].stack is found["w_in_LDF"].stack
    assert (found["w_gate_LDF"].number, found["w_in_LDF"].number) == (0, 1)
    assert found["w_out_LFD"].stack.parts == 1
    assert found["bias_in_LF"] is None
