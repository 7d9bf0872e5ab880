"""Weight gradients added to the host's `main_grad`: the plain path's numbers over micro-batches,
through every way of computing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from moe_plugin.comm import LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.experts import strategies
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.layer import MoELayer
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.routing.replay import checkpoint
from tests.exactness.spills import planned, random_planner
from tests.experts.problems import Largest, make_layer

pytestmark = pytest.mark.fast

SCALE = 1024.0  # of the loss, as a host in fp16 scales it


def test_what_a_failed_step_left_for_later_is_forgotten() -> None:
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 2}))
    weight = layer.experts.w_in_LDF
    layer.experts.later = LaterGrads()
    for _ in range(2):
        layer.experts.later.add(lambda: {"w_in_LDF": torch.ones_like(weight)})
        layer.forget()
    layer.experts.later.compute({"w_in_LDF": weight})
    assert weight.grad is None
    layer.experts.later.add(lambda: {"w_in_LDF": torch.ones_like(weight)})
    layer.experts.later.compute({"w_in_LDF": weight})
    assert weight.grad is not None and bool((weight.grad == 1).all())


def like_megatron(layer: nn.Module, adds: bool, dtype: torch.dtype = torch.float32) -> list[str]:
    """Buffers and hooks as Megatron's DistributedDataParallel has them; the names of parameters in
    the order their hooks ran.
    """
    ran: list[str] = []
    layer.experts.adds_to_main_grad = adds
    for name, parameter in layer.named_parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(
            parameter.shape, dtype=dtype), False

        def hook(p: Tensor, name: str = name) -> None:
            ran.append(name)
            if not p.grad_added_to_main_grad:
                p.main_grad.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(hook)
    return ran


def inputs(dtype: torch.dtype, width: int = 16) -> Iterator[Tensor]:
    """Three micro-batches of different sizes."""
    g = torch.Generator().manual_seed(2)
    for tokens in (33, 7, 20):
        yield torch.randn(tokens, width, generator=g).to(dtype)


def step(layer: MoELayer, x: Tensor, **call: object) -> None:
    """Forward and backward of one micro-batch."""
    (layer(x, **call).output.float().square().sum() * SCALE / 60).backward()


def sgd(layer: nn.Module, lr: float = 1e-3) -> list[Tensor]:
    """fp32 master weights after one step of SGD on main_grad / SCALE."""
    return [p.detach().float() - lr / SCALE * p.main_grad for p in layer.parameters()]


def twins(compute: str, dtype: torch.dtype, **config: object) -> tuple[MoELayer, MoELayer]:
    """The same layer twice: gradients by autograd and the hook, and added to main_grad."""
    torch.manual_seed(1)
    plain = make_layer(compute, **config).to(dtype)
    return plain, copy.deepcopy(plain)


@pytest.mark.parametrize(
    "config", [{}, {"experts": {"hidden_dim": 24, "kind": "gated_ffn", "activation": "silu"}},
               {"dispatch": {"name": "padded", "capacity_factor": 0.75}}],
    ids=["plain", "gated", "padded"])
@pytest.mark.parametrize("compute", strategies.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_plain_path_over_micro_batches(dtype: torch.dtype, compute: str,
                                                  config: dict) -> None:
    config = {
        **config, "experts": {**config.get("experts", {"hidden_dim": 24}), "compute": compute}
    }
    pair = twins(compute, dtype, **config)
    ran = [like_megatron(layer, adds) for layer, adds in zip(pair, (False, True), strict=True)]
    for layer in pair:
        for x in inputs(dtype):
            step(layer, x)
    assert sorted(ran[0]) == sorted(ran[1]) and len(
        ran[1]) == 3 * len(list(pair[1].parameters())), "every hook runs once a micro-batch"
    for (name, p), q in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
        assert q.grad is None and q.grad_added_to_main_grad == (name.startswith("experts.w_")), name
        # bf16: the same products, rounded once and added in the same order; fp32: added while they
        # are made
        tolerance = 1e-6 if dtype == torch.float32 else 0
        torch.testing.assert_close(q.main_grad, p.main_grad, rtol=tolerance,
                                   atol=tolerance * float(p.main_grad.abs().max()),
                                   msg=lambda m, n=name: f"{n}: {m}")
    for mine, theirs in zip(sgd(pair[1]), sgd(pair[0]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("compute", ["fused", "kernels", "loop"])
def test_equals_float64(compute: str) -> None:
    layer, truth = twins(compute, torch.float32)
    truth = truth.double()
    like_megatron(layer, True)
    for x in inputs(torch.float32):
        step(layer, x)
        (truth(x.double()).output.square().sum() * SCALE / 60).backward()
    for (name, p), q in zip(layer.named_parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(p.main_grad.double(), q.grad, rtol=1e-4,
                                   atol=1e-5 * float(q.grad.abs().max()),
                                   msg=lambda m, n=name: f"{n}: {m}")


def test_ways_may_change_within_a_step() -> None:
    """Strategies, autocast, recomputation and a weight's second use in one graph; the mark that one
    leaves misleads no other.
    """
    layer, plain = twins("fused", torch.float32)
    like_megatron(layer, True)
    like_megatron(plain, False)
    for one in (layer, plain):
        for x in inputs(torch.float32):
            step(one, x)
            for kernel in ("loop", "kernels", "batched"):
                step(one, x, choice=LayoutChoice(r=1, kernel=kernel))
            checkpoint(lambda v, one=one: one(v).output, x).square().sum().backward()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                step(one, x)
            (one(x).output +
             one(2 * x, choice=LayoutChoice(r=1, kernel="loop")).output).square().sum().backward()
    for (name, p), q in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.main_grad, q[1].main_grad, rtol=1e-5,
                                   atol=1e-5 * float(q[1].main_grad.abs().max()),
                                   msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("compute", ["fused", "kernels"])
def test_no_whole_gradient_in_the_host_dtype_is_made(compute: str) -> None:
    layer = MoELayer(64, LocalComm(), num_experts=8, experts={"hidden_dim": 64, "compute": compute},
                     dtype=torch.bfloat16)
    like_megatron(layer, True)
    whole = 8 * 64 * 64

    class Float32(Largest):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
            out = func(*args, **(kwargs or {}))
            views = ("select", "slice", "detach", "view", "alias", "add_")  # and in place
            if isinstance(out, Tensor) and out.dtype == torch.float32 and not any(
                    v in str(func) for v in views) and out.numel() > self.numel:
                self.numel, self.made_by = out.numel(), str(func)
            return out

    y = layer(torch.randn(40, 64, dtype=torch.bfloat16)).output.float().sum()
    with Float32() as seen:
        y.backward()
    assert 0 < seen.numel < whole, (f"{seen.made_by} makes {seen.numel} fp32 elements; the weights "
                                    f"have {whole}")


def _several(adds: bool, config: dict, choices: list) -> list[list[Tensor]]:
    def rank(comm):  # noqa: ANN001, ANN202
        layer = MoELayer(
            from_dict({"model_dim": 16, "num_experts": 4, "experts": {"hidden_dim": 24}, **config}),
            comm, dtype=torch.bfloat16)
        like_megatron(layer, adds)
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():  # ranks are threads here and share torch's own generator
            for parameter in layer.router.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g))
            g.manual_seed(comm.rank + 10)
            for parameter in layer.experts.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.3)
        shared = "replicas" in config.get("parallel", {})  # then both ranks have the same tokens
        g.manual_seed(0 if shared else comm.rank)
        for choice in choices:
            for tokens in (12, 9 if shared else 9 + 2 * comm.rank):
                step(layer, torch.randn(tokens, 16, generator=g).to(torch.bfloat16), choice=choice)
        return [p.main_grad for p in layer.experts.parameters()]

    return run_simulated(2, rank)


LAYOUTS = {
    "tokens travel": ({}, [None], 0.0),
    "weights gathered": ({"parallel": {"r": 0}}, [None], 0.0),
    "shards gathered": ({"num_experts": 1, "router": {"top_k": 1}}, [LayoutChoice(r=1)], 0.0),
    # by autograd the pieces' gradients are added in bf16
    "in pieces": ({"parallel": {"d": 2}}, [None], 2e-2),
    "layouts change": ({}, [
        LayoutChoice(r=1),
        LayoutChoice(r=0),
        LayoutChoice(r=1, kernel="loop"),
        LayoutChoice(r=1, d=2)
    ], 2e-2),
    "borrowed": ({"parallel": {"spill": "least_loaded"}}, [None] * 3, 2e-2),
    "replicas": ({
        "parallel": {"replicas": 2}, "dispatch": {"name": "padded", "capacity_factor": 2.0}
    }, [None], 0.0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    config, choices, tolerance = LAYOUTS[name]
    with planned(random_planner(2)) as spilled:
        results = [_several(adds, config, choices) for adds in (True, False)]
    assert bool(spilled) == (name == "borrowed")
    for mine, theirs in zip(*results, strict=True):
        for p, q in zip(mine, theirs, strict=True):
            assert float(q.abs().max()) > 0
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance * float(q.abs().max()))


def test_parameters_whose_gradient_the_host_reads_keep_the_plain_path() -> None:
    layer, plain = twins("fused", torch.float32)
    for mark in ("__fsdp_param__", "zero_out_wgrad"):
        setattr(layer.experts.w_in_LDF, mark, True)
        like_megatron(layer, True)
        assert set(layer.experts.main_grad_weights()) == {"w_out_LFD"}
        delattr(layer.experts.w_in_LDF, mark)
    assert set(layer.experts.main_grad_weights()) == {"w_in_LDF", "w_out_LFD"}
    assert plain.experts.main_grad_weights() == {}
    with torch.no_grad():
        assert layer.experts.main_grad_weights() == {}


def test_without_the_host_mark_no_gradient_is_returned() -> None:
    layer, plain = twins("fused", torch.float32)
    layer.experts.adds_to_main_grad = True
    layer.experts.w_in_LDF.main_grad = torch.zeros_like(layer.experts.w_in_LDF)
    x = next(inputs(torch.float32))
    step(layer, x)
    step(plain, x)
    assert layer.experts.w_in_LDF.grad is None
    torch.testing.assert_close(layer.experts.w_in_LDF.main_grad, plain.experts.w_in_LDF.grad)
    torch.testing.assert_close(layer.experts.w_out_LFD.grad, plain.experts.w_out_LFD.grad)


def test_anomaly_mode_finds_nothing() -> None:
    layer, _ = twins("fused", torch.float32)
    like_megatron(layer, True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            step(layer, next(inputs(torch.float32)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.isfinite(layer.experts.w_in_LDF.main_grad).all()


@pytest.mark.parametrize("compute", ["fused", "kernels", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind,bias,adds", [("ffn", True, False), ("gated_ffn", False, True),
                                            ("gated_ffn", True, False)])
def test_gradients_left_for_later_are_the_same_bits(compute: str, dtype: torch.dtype, kind: str,
                                                    bias: bool, adds: bool) -> None:
    """No weight's hook runs before its gradient is there, and each runs once in a micro-batch."""
    at_once = make_layer(experts={"hidden_dim": 24, "kind": kind, "bias": bias,
                                  "compute": compute}).to(dtype)
    left = copy.deepcopy(at_once)
    hooks = [like_megatron(layer, adds) for layer in (at_once, left)]
    left.experts.later = LaterGrads()
    weights = dict(left.experts.named_parameters(recurse=False))
    for x in inputs(dtype):
        xs = [x.clone().requires_grad_() for _ in range(2)]
        for layer, each in zip((at_once, left), xs, strict=True):
            step(layer, each)
        early = {name for name in hooks[1] if name.startswith("experts.w_")}
        assert bool(early) == (compute == "loop")
        left.experts.later.compute(weights, hooks=True)
        assert torch.equal(xs[0].grad, xs[1].grad) and sorted(hooks[0]) == sorted(hooks[1])
        for ran in hooks:
            ran.clear()
    for (name, one), other in zip(at_once.named_parameters(), left.parameters(), strict=True):
        assert torch.equal(one.main_grad, other.main_grad) and one.main_grad.any(), name
