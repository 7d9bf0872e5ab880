"""Shapes, data types, masks, splits and bytes of any kind: a result, or an error for people."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.checkpoint import CheckpointError, load, merge, save, split
from moe_plugin.config import from_dict
from scripts.emulate.damage import WAYS, damage, files_of
from tests.fuzz.hostile import bounded, is_named

pytestmark = pytest.mark.fast

SIZES = st.lists(st.integers(0, 4), max_size=3)
WIDTHS = st.sampled_from([8, 8, 8, 8, 1, 7, 0, 16])
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16,
                          torch.float16, torch.int64, torch.bool, torch.complex64])
ROUTING: list[dict[str, Any]] = [
    {}, {"router": {"top_k": 4}}, {"router": {"name": "switch"}}, {"router": {"name": "base"}},
    {"dispatch": {"name": "padded", "capacity_factor": 0.5}}, {"experts": {"kind": "gated_ffn"}},
    {"dispatch": {"name": "padded", "capacity_factor": 4.0}}]


@given(SIZES, WIDTHS, DTYPES, st.one_of(st.none(), SIZES), DTYPES, st.sampled_from(ROUTING),
       st.one_of(st.none(), st.integers(-2, 9)))
@bounded(200)
def test_inputs_of_a_layer(sizes: list[int], width: int, dtype: torch.dtype,
                           mask_sizes: list[int] | None, mask_dtype: torch.dtype,
                           config: dict[str, Any], top_k: int | None) -> None:
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, **config}))
    x = torch.ones(*sizes, width).to(dtype)
    mask = None if mask_sizes is None else torch.ones(mask_sizes).to(mask_dtype)
    try:
        out = layer(x, mask, top_k=top_k).output
    except ValueError as error:
        assert is_named(error), error
    else:
        assert out.shape == x.shape and out.dtype == x.dtype


FACTORS = st.one_of(st.none(), st.sampled_from([1e-9, 0.1, 0.5, 0.999, -0.1, -1e-9, 1.0, 1.5]))


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 2), FACTORS, FACTORS,
       st.sampled_from([0.0, 1e-9, 0.25]), st.booleans(), st.sampled_from(["ragged", "padded"]))
@bounded(150)
def test_few_tokens_are_never_all_dropped(tokens: int, experts: int, top_k: int,
                                          factor: float | None, in_evaluation: float | None,
                                          fraction: float, training: bool, name: str) -> None:
    """The first token keeps its first choice: no other comes before it."""
    assume(top_k <= experts)
    assume(name == "ragged" or factor is not None)
    layer = MoELayer(from_dict({
        "model_dim": 8, "num_experts": experts, "router": {"top_k": top_k}, "dispatch": {
            "name": name, "capacity_factor": factor, "eval_capacity_factor": in_evaluation,
            "eval_token_fraction": fraction}})).train(training)
    assert layer(torch.randn(tokens, 8)).stats.kept_KE[0].sum() >= 1


@given(st.integers(1, 12), st.integers(-1, 14), st.integers(-1, 14), st.booleans())
@bounded(200)
def test_splits(experts: int, ranks: int, rank: int, gated: bool) -> None:
    kind = "gated_ffn" if gated else "ffn"
    layer = MoELayer(4, num_experts=experts, experts={"kind": kind}, router={"top_k": 1})
    whole = merge([layer.state_dict()])
    try:
        split(whole, rank, ranks)
        parts = [split(whole, each, ranks) for each in range(ranks)]
        again = merge(parts)
    except ValueError as error:
        assert is_named(error), error
    else:
        assert 0 <= rank < ranks
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.items()
                   if isinstance(tensor, torch.Tensor))


@given(st.sampled_from(WAYS), st.integers(0, 1 << 30), st.integers(0, 1), st.integers(1, 3))
@bounded(150)
def test_bytes_of_a_checkpoint(tmp_path: Path, way: str, seed: int, which: int, times: int) -> None:
    """Where it loads, everything is what was saved."""
    saved, path = tmp_path / "saved", tmp_path / "damaged"
    torch.manual_seed(0)
    model = MoELayer(MoEConfig(model_dim=8, num_experts=4))
    if not saved.exists():
        save(saved, model, extra={"step": 7})
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(saved, path)
    for time in range(times):
        files = files_of(path)
        if files:
            try:
                damage(files[which % len(files)], way, seed + time)
            except ValueError:  # it is empty by now
                continue
    fresh = MoELayer(MoEConfig(model_dim=8, num_experts=4))
    try:
        extra = load(path, fresh)
    except CheckpointError as error:
        assert is_named(error), error
    else:
        assert extra == {"step": 7}
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(),
                                                     strict=True))
