"""The memory of a model on the meta device against the same step on the CPU, counted exactly."""

from __future__ import annotations

import pytest
import torch

from moe_plugin.cli.measure.traced_layers import AliveBytes

pytest.importorskip("transformers.integrations.moe")
FAMILIES = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 96},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 48, "intermediate_size": 96,
                  "head_dim": 16},
    "olmoe": {"num_experts": 8, "intermediate_size": 48},
    "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 48, "intermediate_size": 96,
                 "first_k_dense_replace": 1, "head_dim": 16, "n_group": 1, "topk_group": 1},
}
COMMON = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 128, "num_experts_per_tok": 2,
          "pad_token_id": None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_peak_is_the_measured_peak(family: str, dtype: torch.dtype) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from moe_plugin.cli.measure.traced_transformers import build, model_bytes

    config = CONFIG_MAPPING[family](**COMMON, **FAMILIES[family])
    traced = model_bytes(build(config, dtype), 128, 2)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm")
    with AliveBytes() as alive:
        alive.leave_out(model.buffers())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        alive.now = alive.peak = 0  # only activations are compared
        ids = torch.zeros(2, 128, dtype=torch.long)
        alive.leave_out((*model.parameters(), ids))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert traced.parameters == sum(p.numel() for p in model.parameters())
    assert traced.saved + traced.extra == pytest.approx(alive.peak, rel=0.05)
