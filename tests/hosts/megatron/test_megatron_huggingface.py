"""A Hugging Face model becomes a checkpoint that the training script loads, and the reverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
pytest.importorskip("transformers", reason="needs pip install 'moe-plugin[hf]'")

import transformers

import moe_plugin.checkpoint.formats.all  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.base import CheckpointSizes, convert, formats, open_source
from tests.checkpoint.hf_models import tiny
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import logits, refusal

pytestmark = pytest.mark.megatron
VOCABULARY = 384  # the training script's for bytes
ARGUMENTS = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4",
    "--group-query-attention", "--num-query-groups", "2", "--seq-length", "16",
    "--position-embedding-type", "rope", "--rotary-base", "1000000", "--normalization", "RMSNorm",
    "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--num-experts",
    "4", "--moe-ffn-hidden-size", "48", "--moe-router-dtype", "fp32", "--micro-batch-size", "1",
    "--train-iters", "1", "--lr", "1e-3", "--mock-data"]


GLM = ["--ffn-hidden-size", "40", "--moe-layer-freq", "[0,1]", "--rotary-percent", "0.5",
       "--rotary-base", "10000", "--norm-epsilon", "1e-5", "--kv-channels", "12", "--qk-layernorm",
       "--add-qkv-bias", "--moe-router-score-function", "sigmoid",
       "--moe-router-enable-expert-bias", "--moe-router-topk-scaling-factor", "1.5",
       "--moe-shared-expert-intermediate-size", "96"]


def _written(source: Any, path: Path) -> Path:
    path.mkdir(parents=True)
    formats.get(source.format)().write(source, path, CheckpointSizes())
    return path


def test_mixtral_has_the_same_logits_in_megatron_and_comes_back(data: str,
                                                                tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, initializer_range=0.3, rope_theta=1e6)
    theirs = transformers.MixtralForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    tokens_BT = torch.randint(0, 257, (2, 16))
    wanted = theirs(tokens_BT).logits.detach()
    with open_source(tmp_path / "hf") as source:
        root = _written(convert(source, "megatron"), tmp_path / "megatron")
        native = _written(convert(source, "megatron_native"), tmp_path / "native")
    for argv, path in ((ARGUMENTS, root), ([*ARGUMENTS, "--native-moe"], native)):
        [found] = on_ranks(1, logits, argv, str(path), tokens_BT)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with open_source(root) as source:
        back = _written(convert(source, "hf"), tmp_path / "back")
    again = transformers.MixtralForCausalLM.from_pretrained(back).eval()
    assert torch.equal(again(tokens_BT).logits, wanted)
    [message] = on_ranks(1, refusal, [*ARGUMENTS[:-1], "--data-path", data, "--add-qkv-bias",
                                       "--load", str(root)])
    assert "add_qkv_bias=False" in message


@pytest.mark.slow
def test_glm_has_the_same_logits_in_megatron_and_comes_back(tmp_path: Path) -> None:
    """Positions that turn a part of each head, norms and biases of queries, a dense first layer."""
    theirs = tiny("glm4_moe", vocab_size=VOCABULARY, num_hidden_layers=2, moe_intermediate_size=48,
                  n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=2, n_group=1,
                  topk_group=1, head_dim=12)
    theirs.save_pretrained(tmp_path / "hf")
    tokens_BT = torch.randint(0, 257, (2, 16))
    wanted = theirs(tokens_BT).logits.detach()
    with open_source(tmp_path / "hf") as source:
        root = _written(convert(source, "megatron"), tmp_path / "megatron")
    [found] = on_ranks(1, logits, [*ARGUMENTS, *GLM], str(root), tokens_BT)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with open_source(root) as source:
        back = _written(convert(source, "hf"), tmp_path / "back")
    again = transformers.Glm4MoeForCausalLM.from_pretrained(back).eval()
    assert torch.equal(again(tokens_BT).logits, wanted)
