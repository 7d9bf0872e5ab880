"""Models of `transformers` in bfloat16, with experts whose width fits no vector of 16 bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.cli.main import main
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from tests.checkpoint.hf_models import ALONE, MODELS, tiny, tokens

transformers = pytest.importorskip("transformers", minversion="5.20")


def gradients(model: Any) -> Tensor:
    """The gradients of all parameters outside of MoE blocks, as one vector."""
    ids = tokens(model)
    model(ids, labels=ids).loss.backward()
    return torch.cat([p.grad.float().flatten() for name, p in model.named_parameters()
                      if "mlp" not in name])


@pytest.mark.parametrize("width", [7, 20])
@pytest.mark.parametrize("kind", [*MODELS, "gpt_oss"])
def test_gradients_are_as_near_float32_as_those_of_transformers(kind: str, width: int) -> None:
    """All experts are chosen, so that rounding cannot change a choice."""
    _, sizes = (MODELS | ALONE)[kind]
    chosen = {"num_experts_per_tok": next(
        sizes[name] for name in ("n_routed_experts", "num_experts", "num_local_experts")
        if name in sizes)}
    if "n_group" in sizes:
        chosen["topk_group"] = sizes["n_group"]
    inner = next(name for name in ("moe_intermediate_size", "intermediate_size") if name in sizes)
    model = tiny(kind, **{**chosen, inner: width}).train()
    model.set_experts_implementation("eager")
    theirs, ours = (copy.deepcopy(model).bfloat16() for _ in range(2))
    assert swap_moe_blocks(ours)
    want, theirs, ours = map(gradients, (model, theirs, ours))
    assert 0 < (ours - want).norm() <= 1.3 * (theirs - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("kind,inner,dtype", [
    ("deepseek_v3", "moe_intermediate_size", "bfloat16"),
    ("mixtral", "intermediate_size", "float32")])
def test_check_hf_of_widths_that_grouped_products_refuse(kind: str, inner: str, dtype: str,
                                                         tmp_path: Path) -> None:
    model = tiny(kind, getattr(torch, dtype), **{inner: 18})
    with pytest.raises(RuntimeError, match="16 bytes"):
        model(tokens(model))
    model.save_pretrained(tmp_path)
    assert main(["check-hf", str(tmp_path), "--tokens", "9", "--dtype", dtype]) == 0
