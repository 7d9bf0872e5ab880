"""fairseq's optimizers with our layers: torch's fused Adam, apex's, and `--store-ema`."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fairseq import optim, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim.adam import Adam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.experts.base import expert_parameters
from moe_plugin.hosts.fairseq.adam import FusedAdam, encoded
from moe_plugin.hosts.fairseq.trainer import norm_squared
from moe_plugin.routing import finish_step
from moe_plugin.training.gradients.replicas import mark_replicas
from tests.hosts.fairseq import small
from tests.hosts.fairseq.conftest import Corpus, train
from tests.routing.test_fp32 import settings as layer_settings

PRECISIONS = ["", "--fp16", "--bf16", "--memory-efficient-fp16", "--memory-efficient-bf16"]


def _parameters() -> list[nn.Parameter]:
    """Of all dtypes; the second is not contiguous, as a tied and transposed weight."""
    torch.manual_seed(0)
    values = [torch.randn(5, 3), torch.randn(4, 6).t(), torch.randn(7).half(),
              torch.randn(2, 3).bfloat16(), torch.randn(3).double(), torch.randn(2)]
    return [nn.Parameter(value) for value in values]


def _give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Other strides than the weight's, sizes near eps, and at some steps none."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(parameters):
        grad = torch.randn(p.shape[::-1], generator=generator).to(p.dtype)
        p.grad = grad.permute(*reversed(range(p.dim()))) * (1e-7 if i == 0 else 1.0)
    if step % 3 == 1:
        parameters[-1].grad = None


def _step(optimizer: Any, parameters: list[nn.Parameter], step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (step + 1) / 20
    _give_gradients(parameters, step)
    optimizer.step()


def _same(seen: list[nn.Parameter], wanted: list[nn.Parameter]) -> None:
    for mine, theirs in zip(seen, wanted, strict=True):
        # a rounding of float32 may move a bfloat16 by its own
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_fairseqs_adam(decay: float) -> None:
    options_: Any = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": decay}
    wanted, seen = _parameters(), _parameters()
    native, ours = Adam(wanted, **options_), FusedAdam(seen, **options_)
    for step in range(20):
        _step(native, wanted, step)
        _step(ours, seen, step)
        _same(seen, wanted)
    for mine, theirs in zip(seen, wanted, strict=True):
        assert ours.state[mine]["step"] == native.state[theirs]["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[mine][name], native.state[theirs][name])


@pytest.mark.parametrize("kinds", [(Adam, FusedAdam), (FusedAdam, Adam)])
def test_each_continues_the_others_state(kinds: tuple[type, type]) -> None:
    wanted, seen = _parameters(), _parameters()
    whole, first = Adam(wanted, lr=0.01), kinds[0](seen, lr=0.01)
    for step in range(10):
        _step(whole, wanted, step)
        _step(first, seen, step)
    second = kinds[1](seen, lr=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.state_dict()["param_groups"] == first.state_dict()["param_groups"]
    for step in range(10, 20):
        _step(whole, wanted, step)
        _step(second, seen, step)
    # of half-precision parameters torch loads moments in half precision (fairseq puts them back)
    torch.testing.assert_close(seen[:2] + seen[4:], wanted[:2] + wanted[4:])


@given(st.integers(0, 10**6), st.integers(-30, 30), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_halves_are_near_and_are_encoded_again_without_an_error(seed: int, size: int,
                                                                spread: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(50, generator=generator) * torch.exp2(
        size - spread * torch.rand(50, generator=generator))
    half, unit = encoded(x)
    again = half.float() * unit
    assert half.dtype == torch.float16 and torch.frexp(unit)[0] == 0.5
    assert 32752 <= half.abs().max() <= 65504
    assert ((again - x).abs() <= 2**-11 * x.abs() + 2**-39 * x.abs().max()).all()
    for value in (again, again.square().sqrt() * again.sign()):
        same, other = encoded(value)
        assert torch.equal(same.float() * other, again)
    assert not encoded(torch.zeros(3))[0].any() and encoded(torch.zeros(0))[0].numel() == 0


def test_halves_take_half_the_memory_and_resume_to_the_same_bits() -> None:
    wanted, seen, rough = _parameters()[:2], _parameters()[:2], _parameters()[:2]
    whole, first, floats = (FusedAdam(wanted, half=True), FusedAdam(seen, half=True),
                            FusedAdam(rough))
    for step in range(10):
        for optimizer, parameters in ((whole, wanted), (first, seen), (floats, rough)):
            _step(optimizer, parameters, step)
    held = [x for state in whole.state.values() for pair in state["halves"] for x in pair]
    assert sum(x.numel() * x.element_size() for x in held) == sum(
        4 * p.numel() + 8 for p in wanted)
    assert {x.dtype for state in whole.state_dict()["state"].values()
            for x in (state["exp_avg"], state["exp_avg_sq"])} == {torch.float32}
    second = FusedAdam(seen, lr=0.5, half=True)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(10, 20):
        for optimizer, parameters in ((whole, wanted), (second, seen), (floats, rough)):
            _step(optimizer, parameters, step)
    for mine, theirs, float32 in zip(seen, wanted, rough, strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, float32, rtol=2e-3, atol=2e-4)


def test_flat_parameters_and_sparse_gradients() -> None:
    flat = nn.Parameter(torch.randn(100))
    wanted = nn.Parameter(flat.detach().clone())
    for parameter, kind in ((flat, FusedAdam), (wanted, Adam)):
        parameter.grad = torch.arange(100.0)
        optimizer = kind([parameter], lr=0.1)
        assert optimizer.supports_flat_params and optimizer.supports_memory_efficient_fp16
        optimizer.step()
    torch.testing.assert_close(flat, wanted)
    flat.grad = torch.zeros(100).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        FusedAdam([flat]).step()


def _settings(*flags: str) -> Any:
    arguments = ["data", "--task", "language_modeling", "--arch", "transformer_lm", "--optimizer",
                 "adam", "--lr", "0.01", "--weight-decay", "0.01", "--cpu", "--fp16-scale-window",
                 "4", "--fp16-init-scale", "8", *flags]
    return convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), arguments))


def _optimizer(cfg: Any, parameters: list[nn.Parameter]) -> Any:
    """As fairseq's trainer builds it."""
    if not (cfg.common.fp16 or cfg.common.bf16):
        return optim.build_optimizer(cfg.optimizer, parameters)
    lean = cfg.common.memory_efficient_fp16 or cfg.common.memory_efficient_bf16
    kind = optim.MemoryEfficientFP16Optimizer if lean else optim.FP16Optimizer
    return kind.build_optimizer(cfg, parameters)


def test_a_class_derived_from_fairseqs_fp16_optimizer_is_made_as_itself() -> None:
    class Derived(optim.FP16Optimizer):
        pass

    cfg = _settings("--fp16")
    assert type(Derived.build_optimizer(cfg, [nn.Parameter(torch.ones(3).half())])) is Derived
    assert cfg.common.fp16_no_flatten_grads


def _curve(*flags: str, steps: int = 20) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses of a language model with experts, what its expert weights moved, its optimizer."""
    cfg = _settings(*flags)
    model = small.language_model(moe_dispatch="ragged", moe_capacity_factor="none",
                                 moe_second_expert_policy="all")
    dtype = torch.bfloat16 if cfg.common.bf16 else torch.half if cfg.common.fp16 else torch.float32
    model.to(dtype)
    start = {name: p.detach().clone() for name, p in expert_parameters(model).items()}
    optimizer = _optimizer(cfg, list(model.parameters()))
    tokens, losses = small.tokens(), []
    for step in range(steps):
        optimizer.set_lr(0.01 / (1 + step))
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])[0].float()
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.backward(loss)
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(0.25)
        optimizer.step()
        losses.append(loss.item())
    moved = {name: p.detach().float() - start[name].float()
             for name, p in expert_parameters(model).items()}
    return losses, moved, optimizer


def _same_run(seen: tuple, wanted: tuple, loss: float, moved: float) -> None:
    """loss: bound of the difference; moved: bound of that of the weights, of all movement."""
    torch.testing.assert_close(seen[0], wanted[0], rtol=0, atol=loss)
    assert wanted[0][-1] < wanted[0][0] - 1 and wanted[1]
    for name, value in wanted[1].items():
        assert (seen[1][name] - value).norm() <= moved * value.norm(), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_and_experts_equal_those_of_fairseqs_adam(precision: str) -> None:
    flags = precision.split()
    wanted, seen = _curve(*flags), _curve(*flags, "--moe-fused-adam")
    assert type(wanted[2].optimizer) is Adam and type(seen[2].optimizer) is FusedAdam
    # a rounding of float32 in Adam may move a half-precision weight by one of its own
    _same_run(seen, wanted, *((2e-2, 5e-2) if "bf16" in precision else (
        1e-2, 2e-2) if precision else (1e-4, 1e-4)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_16_bit_statistics_need_no_apex(precision: str) -> None:
    flags = precision.split()
    wanted, seen = _curve(*flags), _curve(*flags, "--fp16-adam-stats")
    assert seen[2].optimizer.half
    _same_run(seen, wanted, *((3e-2, 5e-2) if precision else (1e-2, 2e-2)))


@pytest.mark.distributed
@pytest.mark.parametrize(("first", "second"), [
    ("--moe-fused-adam", ""), pytest.param("", "--moe-fused-adam", marks=pytest.mark.slow)])
def test_a_run_resumes_with_the_other_adam(first: str, second: str, corpus: Corpus,
                                           tmp_path: Path) -> None:
    """Two ranks, clipping, weight decay and a schedule: 4 steps of one Adam, 4 of the other."""
    flags = ("--disable-validation --optimizer adam --lr 0.02 --weight-decay 0.1 --lr-scheduler "
             "inverse_sqrt --warmup-updates 3")
    whole = train(corpus, tmp_path, f"{flags} --max-update 8", 2).ok()
    start, end = (train(corpus, tmp_path / "run", f"{flags} --max-update {last} {more}", 2,
                        save=True).ok() for last, more in ((4, first), (8, second)))
    for part, flag in ((start, first), (end, second)):
        words = "Adam of torch: --moe-fused-adam" if flag else "Adam of fairseq: apex needs a"
        assert words in part.log
    assert start.losses + end.losses == pytest.approx(whole.losses, abs=2.1e-3)
    assert [step["gnorm"] for step in start.steps + end.steps] == pytest.approx(
        [step["gnorm"] for step in whole.steps], abs=2.1e-3)


def _executed_again(module: ModuleType) -> ModuleType:
    """A second module of the same file; fairseq's modules look for apex when they are imported."""
    spec = importlib.util.spec_from_file_location(f"again_{module.__name__}", module.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


@pytest.fixture
def fairseq_with_apex(apex: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """fairseq as if it had found apex, and CPU tensors that pass for a GPU's."""
    from fairseq import utils

    for name, parts in (("fairseq.modules.layer_norm", ("FusedLayerNorm", "has_fused_layernorm")),
                        ("fairseq.optim.fused_adam", ("FusedAdamV2",))):
        module = importlib.import_module(name)
        again = _executed_again(module)
        for part in parts:
            monkeypatch.setitem(vars(module), part, vars(again)[part])
    monkeypatch.setattr(utils, "multi_tensor_l2norm_available", True)
    monkeypatch.setattr(Tensor, "cuda", lambda self, *_, **__: self.clone())
    return apex


@pytest.mark.parametrize(("flags", "deprecated", "adam", "call"), [
    ("", True, "FusedAdamV1", "fused_adam_cuda.adam"),
    ("--fp16 --fp16-adam-stats", True, "FusedAdamV1", "fused_adam_cuda.adam"),
    ("--memory-efficient-bf16", True, "FusedAdamV1", "fused_adam_cuda.adam"),
    ("", False, "FusedAdamV2", "multi_tensor_adam"),
    ("--memory-efficient-fp16", False, "FusedAdamV2", "multi_tensor_adam"),
    ("--memory-efficient-bf16", False, "FusedAdam", None),
])
def test_apex_with_experts(flags: str, deprecated: bool, adam: str, call: str | None,
                           fairseq_with_apex: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """deprecated: apex is built with the extension that fairseq prefers."""
    if not deprecated:
        monkeypatch.setitem(sys.modules, "fused_adam_cuda", None)
    given = ["--weight-decay", "0", *flags.split()]
    stock = [flag for flag in given if flag != "--fp16-adam-stats"]
    wanted = _curve(*stock, "--use-old-adam")
    assert {"FusedLayerNorm"} <= set(fairseq_with_apex)
    fairseq_with_apex.clear()
    seen = _curve(*given)
    assert type(seen[2].optimizer).__name__ == adam
    # clipping, and the factor 1/2; apex has no such function for bfloat16, and its deprecated Adam
    # multiplies gradients itself in mixed precision
    scales = "bf16" not in flags and not (flags and deprecated)
    wanted_calls = {"FusedLayerNorm", call, "multi_tensor_scale" if scales else None}
    assert set(fairseq_with_apex) == wanted_calls - {None}
    # statistics of 16 bits are rounded; apex's newer Adam adds eps in another place
    rough = "stats" in flags or "bf16" in flags
    _same_run(seen, wanted, *((0.1, 0.1) if rough else (2e-2, 2e-2)))


def test_16_bit_statistics_without_apexs_extension_are_torchs(
        fairseq_with_apex: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fused_adam_cuda", None)
    assert _curve("--fp16", "--fp16-adam-stats")[2].optimizer.half


def test_the_norm_of_experts_is_apexs(apex: list[str]) -> None:
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    for parameter, replicas in zip(parameters, (1, 2, 2), strict=True):
        mark_replicas(parameter, replicas)
        parameter.grad = torch.full((4,), 3.0)
    squared = norm_squared(parameters, None, torch.device("cpu"))
    assert float(squared) == pytest.approx(36.0 + 2 * 36.0 / 2)
    assert apex == 2 * ["multi_tensor_l2norm"]


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("router", ["sigmoid_bias", "dense_to_sparse", "switch,sigmoid_bias"])
def test_averages(router: str, fp32: bool) -> None:
    """a <- (a + w) / 2; a router under `router.fp32` and its bias in float32, integers copied."""
    from fairseq.dataclass.configs import EMAConfig
    from fairseq.models.ema.ema import EMA

    import moe_plugin.hosts.fairseq  # noqa: F401 - mends fairseq

    layer = MoELayer(from_dict(layer_settings(router))).bfloat16()
    before = {name: value.clone() for name, value in layer.state_dict().items()
              if isinstance(value, torch.Tensor)}
    ema = EMA(layer, EMAConfig(store_ema=True, ema_decay=0.5, ema_fp32=fp32))
    with torch.no_grad():
        for value in (*layer.parameters(), *layer.buffers()):
            if value.is_floating_point():
                value.add_(0.001)
    finish_step(layer)
    ema.step(layer, 1)
    found, now = ema.get_model().state_dict(), layer.state_dict()
    for name, value in before.items():
        assert found[name].dtype == value.dtype
        if not value.is_floating_point():
            assert torch.equal(found[name], now[name]) and not torch.equal(now[name], value)
            continue
        want = (value.double() + now[name].double()) / 2
        off = 2**-22 if value.dtype == torch.float32 else 2**-7  # of the largest, about 1
        torch.testing.assert_close(found[name].double(), want, rtol=0, atol=off)
        assert value.dtype == (torch.float32 if "router." in name else torch.bfloat16), name
    again = EMA(layer, EMAConfig(store_ema=True, ema_fp32=fp32))
    again.restore(found)
    assert all(torch.equal(again.get_model().state_dict()[name], found[name]) for name in before)
