"""`experts_implementation="moe_plugin"` computes what each class of experts of `transformers` does.
"""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.20")

import moe_plugin.hosts.transformers as ours  # noqa: E402
from moe_plugin.experts.ffn import FFNExperts  # noqa: E402
from moe_plugin.hosts.transformers.register import KEPT  # noqa: E402
from tests.checkpoint.hf_models import MODELS, tiny, tokens  # noqa: E402

EXPERTS, WIDTH = 8, 32
# with an activation that is not among ours, or a gate that is clamped, or with a norm behind
OWN_FORM = {"Beam", "DeepseekV4", "Glm5NextText", "GptOss", "HYV4", "HYV4VL", "Inkling2",
            "Inkling2Loop", "MiniMaxM3VL", "MuseSpark", "OpenAIPrivacyFilter", "Step3p7"}


def classes() -> list[tuple[str, str]]:
    """(module, class) of everything that is decorated."""
    found, decorated = [], re.compile(
        r"^@use_experts_implementation.*\n(?:@.*\n)*class (\w+)", re.M)
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        found += [(f"transformers.models.{path.parent.name}.{path.stem}", name)
                  for name in decorated.findall(path.read_text())]
    return found


class Config:
    """Small sizes by whatever name a class of experts reads them."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        for parts, value in ((("act",), "silu"), (("limit", "alpha", "softcap"), 1.5),
                             (("eps",), 1e-6), (("inter", "ffn", "moe_hidden"), 48),
                             (("latent",), None), (("expert",), EXPERTS),
                             (("hidden", "dim"), WIDTH)):
            if not name.startswith("_") and any(part in name for part in parts):
                return value
        raise AttributeError(name)


def results(module: nn.Module, name: str, width: int) -> list[Tensor]:
    """Output and every gradient of a call with this implementation."""
    module.config._experts_implementation = name
    g = torch.Generator().manual_seed(3)
    x_TD = torch.randn(23, width, generator=g).requires_grad_()
    weights_TK = torch.rand(23, 2, generator=g).requires_grad_()
    ids_TK = torch.stack([torch.randperm(EXPERTS - 1, generator=g)[:2] for _ in range(23)])
    module.zero_grad()
    y_TD = module(x_TD, ids_TK, weights_TK)  # the last expert has no tokens
    (y_TD * torch.randn(y_TD.shape, generator=g)).sum().backward()
    return [y_TD.detach(), x_TD.grad, weights_TK.grad, *(p.grad for p in module.parameters())]


def close(got: list[Tensor], want: list[Tensor], bound: float = 5e-6) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.parametrize("module,name", classes())
def test_every_class_of_experts(module: str, name: str) -> None:
    torch.manual_seed(0)
    experts = getattr(importlib.import_module(module), name)(Config())
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    width = first.shape[1 if experts.is_transposed else 2]
    want = results(experts, "eager", width)
    close(results(experts, "moe_plugin", width), want)
    computed_by = type(vars(experts)[KEPT].routed.experts)
    assert issubclass(computed_by, FFNExperts) != (name.removesuffix("Experts") in OWN_FORM)


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_model_trains_generates_saves_and_is_copied(kind: str, tmp_path: Path) -> None:
    model = tiny(kind).train()
    ids = tokens(model)

    def gradients(model: Any) -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids, output_router_logits=True).loss.backward()
        return [p.grad for p in model.parameters()]

    model.set_experts_implementation("eager")
    want, written = gradients(model), model.generate(ids, max_new_tokens=5, do_sample=False)
    model.set_experts_implementation("moe_plugin")
    close(gradients(model), want)
    model.gradient_checkpointing_enable()
    close(gradients(model), want)
    model.gradient_checkpointing_disable()
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), written)
    close(gradients(copy.deepcopy(model)), want)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moe_plugin").train()
    close(gradients(again), want)


@pytest.mark.parametrize("kind", MODELS)
def test_frozen_experts_get_no_gradients(kind: str) -> None:
    model = tiny(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    ids = tokens(model)
    found = []
    for name in ("eager", "moe_plugin"):
        model.set_experts_implementation(name)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    close(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_and_autocast(dtype: torch.dtype) -> None:
    model = tiny("qwen2_moe", dtype)
    ids = tokens(model)
    model.set_experts_implementation("eager")
    want = model(ids).logits.double()
    model.set_experts_implementation("moe_plugin")
    got = model(ids).logits.double()
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-12
    assert (got - want).abs().max() <= bound * want.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float()(ids).logits.isfinite().all()


def test_adapters_on_experts() -> None:
    """peft's LoRA of parameters: the adapters' gradients are those of transformers' own experts."""
    peft = pytest.importorskip("peft")
    model = tiny("mixtral").train()  # layouts are tuned in training
    torch.manual_seed(2)
    adapted = peft.get_peft_model(model, peft.LoraConfig(
        r=2, init_lora_weights=False, target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
    ids, found = tokens(model), []
    ours.use({"parallel": "auto"}, "tuned")
    for name in ("eager", "tuned", "moe_plugin"):
        model.set_experts_implementation(name)
        adapted.zero_grad()
        adapted(input_ids=ids, labels=ids).loss.backward()
        found.append([p.grad for p in adapted.parameters() if p.grad is not None])
    assert len(found[0]) > 12
    close(found[1], found[0])
    close(found[2], found[0])


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_adapters_are_recomputed(kind: str) -> None:
    """A recomputation saves the same tensors in the same order as the forward pass, from the first
    call on; also where a parametrization of the user's is computed at each read.
    """
    peft = pytest.importorskip("peft")

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x * x.sigmoid()

    def gradients(how: str, checkpointing: bool, name: str = "moe_plugin") -> list[Tensor]:
        model = tiny(kind)
        model.set_experts_implementation(name)
        if how == "peft":
            torch.manual_seed(5)
            model = peft.get_peft_model(model, peft.LoraConfig(
                r=2, target_modules=[], init_lora_weights=False,
                target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
            model.enable_input_require_grads()
        else:
            for layer in model.model.layers:
                for name in ("gate_up_proj", "down_proj"):
                    nn.utils.parametrize.register_parametrization(layer.mlp.experts, name,
                                                                  Doubled())
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(tokens(model), labels=tokens(model)).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for how in ("peft", "a parametrization"):
        plain = gradients(how, False)
        close(gradients(how, True), plain, 1e-6)
        close(plain, gradients(how, False, "eager"))


def test_an_activation_is_known_by_its_values() -> None:
    from moe_plugin.hosts.transformers.experts import activation_of

    def named(act: Any) -> str | None:
        return activation_of(SimpleNamespace(  # type: ignore[arg-type]
            act_fn=act, has_gate=False, has_post_expert_norm=False))

    acts = transformers.activations.ACT2FN
    known = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
             "relu2": "squared_relu", "quick_gelu": "quick_gelu"}
    assert {name: named(acts[name]) for name in known} == known
    assert not any(named(acts[name]) for name in ("relu6", "gelu_10"))
    assert named(nn.PReLU()) is None
    assert named(lambda gate, up: gate * up) is None
