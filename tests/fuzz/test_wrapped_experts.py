"""Layers with something around their experts or parameters: the values of merged weights, or a
named error, whatever the settings and the order of what was put there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from moe_plugin import MoEBlock, auxiliary_loss, finish_step
from tests.fuzz.hostile import bounded, is_named

WIDTH = 4
EXPERT_MATRICES = ("w_in_LDF", "w_gate_LDF", "w_out_LFD")
SETTINGS: dict[str, list[Any]] = {
    "num_experts": [1, 2, 4], "top_k": [1, 2],
    "router": ["topk", "switch", "sigmoid_bias", "dense_to_sparse", "sinkhorn", "cosine"],
    "expert_kind": ["ffn", "gated_ffn"], "expert_bias": [False, True],
    "expert_compute": ["auto", "loop", "batched", "grouped"],
    "capacity_factor": [1.0, 2.0], "dispatch": ["ragged", "padded"], "overlap": [1, 2],
    "experts_on": ["device", "host"], "stats_jsonl": ["run.jsonl"], "votes": [3]}
RUNS_ONLY = ("stats_jsonl", "votes")


class Doubled(nn.Module):
    """A parametrization with nothing to train."""

    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def wrapped(model: nn.Module, how: str, part: str, names: list[str]) -> nn.Module:
    inner = getattr(model[0].moe, part)
    names = [name for name in names if getattr(inner, name, None) is not None]
    if how == "lora":
        peft = pytest.importorskip("peft")
        if not names:
            return model
        targets = [f"0.moe.{part}.{name}" for name in names]
        return peft.get_peft_model(model, peft.LoraConfig(
            target_parameters=targets, r=2, init_lora_weights=False))
    for name in names:
        if how == "weight norm":
            parametrizations.weight_norm(inner, name, dim=0)
        else:
            parametrize.register_parametrization(inner, name, Doubled())
    return model


def merged(model: nn.Module, how: str) -> nn.Module:
    if how == "lora":
        return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    for module in list(model.modules()):
        for name in list(getattr(module, "parametrizations", ())):
            parametrize.remove_parametrizations(module, name)
    return model


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], str, str, list[str]]:
    chosen = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=4, unique=True))
    settings = {name: draw(st.sampled_from(SETTINGS[name])) for name in chosen}
    part = draw(st.sampled_from(["experts", "router"]))
    names = EXPERT_MATRICES if part == "experts" else ("weight_ED",)
    return (settings, draw(st.sampled_from(["lora", "weight norm", "doubled"])), part,
            draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))


@given(cases())
@bounded(120)
def test_wrapped_parts(case: tuple[dict[str, Any], str, str, list[str]]) -> None:
    settings, how, part, names = case
    torch.manual_seed(0)
    try:
        model = wrapped(nn.Sequential(MoEBlock(WIDTH, **settings)), how, part, names)
        assert not any(name in settings for name in RUNS_ONLY), "nothing in a layer reads it"
        x_TD = torch.randn(7, WIDTH)
        (model(x_TD).square().sum() + auxiliary_loss(model)).backward()
        finish_step(model)
        trained = {n: p.grad for n, p in model.named_parameters()
                   if p.requires_grad and f"{part}." in n}
        assert None not in trained.values(), trained
        model.eval()
        with torch.no_grad():
            before = model(x_TD)
            torch.testing.assert_close(merged(model, how)(x_TD), before, rtol=1e-4, atol=1e-5)
    except ValueError as error:
        assert is_named(error), error
