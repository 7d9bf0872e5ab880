"""Hugging Face models and Megatron's GPT model with our layers compute the same, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
pytest.importorskip("transformers", reason="needs pip install 'moe-plugin[dev]'")

import transformers

from moe_plugin.cli.main import main
from tests.checkpoint.hf_models import logits, tiny, tokens
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import Run, when_built

pytestmark = pytest.mark.megatron
MODEL = [
    "--num-layers", "3", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--micro-batch-size", "1", "--lr", "0.1", "--optimizer", "sgd", "--train-iters", "1",
    "--mock-data", "--group-query-attention", "--num-query-groups", "2", "--swiglu",
    "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope",
    "--moe-router-dtype", "fp32", "--hidden-dropout", "0", "--attention-dropout", "0",
    "--untie-embeddings-and-output-weights", "--vocab-size", "127"  # and an end of document
]
# settings of the model of transformers, arguments of Megatron
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mixtral": (
        {"sliding_window": None}, ["--num-experts", "6", "--moe-ffn-hidden-size", "40"]),
    "qwen3_moe": (
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-5},
        ["--num-experts", "8", "--moe-ffn-hidden-size", "24", "--moe-router-topk", "3",
         "--qk-layernorm", "--kv-channels", "12"]),
}


def _in_megatron(argv: list[str], folder: str, out: str | None, ids: Tensor) -> list[Tensor]:
    """Logits of the loaded checkpoint; with `out`, also those after a step of SGD, of which a
    checkpoint is written there.
    """
    def work(run: Run) -> list[Tensor]:
        from moe_plugin.hosts.megatron.compat.settings import training_module

        positions, chunk = torch.arange(ids.shape[1]).expand_as(ids), run.chunks[0]
        found = [chunk(ids, positions, None)]
        if out is not None:
            chunk.zero_grad_buffer()
            found[0].square().mean().backward()
            chunk.finish_grad_sync()
            run.optimizer.step()
            training_module("checkpointing").save_checkpoint(
                1, run.chunks, run.optimizer, run.scheduler, 0)
            found.append(chunk(ids, positions, None))
        return [logits.detach() for logits in found]

    saves = [] if out is None else ["--save", out]
    return when_built([*argv, "--load", folder, *saves], work)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", CASES)
def test_logits_are_equal_in_both_directions(kind: str, tmp_path: Path) -> None:
    settings, more = CASES[kind]
    theirs = tiny(kind, vocab_size=128, rope_theta=10000.0, **settings)
    theirs.save_pretrained(tmp_path / "hf")
    there, trained, back = (str(tmp_path / name) for name in ("there", "trained", "back"))
    assert main(["reshard", str(tmp_path / "hf"), there, "--to", "megatron"]) == 0
    ids = tokens(theirs)
    [(first, second)] = on_ranks(1, _in_megatron, [*MODEL, *more], there, trained, ids)
    close(first, logits(theirs, ids))
    assert not torch.allclose(second, first, rtol=1e-3)
    assert main(["reshard", trained, back, "--to", "hf", "--model-only"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert type(again) is type(theirs)
    close(logits(again, ids), second)


@pytest.mark.distributed
def test_a_dense_checkpoint_of_megatron_becomes_experts(tmp_path: Path) -> None:
    dense = tiny("llama", vocab_size=128, rms_norm_eps=1e-5)
    dense.save_pretrained(tmp_path / "hf")
    there, moe = str(tmp_path / "there"), str(tmp_path / "moe")
    assert main(["reshard", str(tmp_path / "hf"), there, "--to", "megatron"]) == 0
    assert main(["upcycle", there, moe, "--experts", "6", "--top-k", "4", "--granularity",
                 "2"]) == 0
    argv = [*MODEL, "--num-experts", "6", "--moe-ffn-hidden-size", "24", "--moe-router-topk", "4"]
    ids = tokens(dense)
    [(found,)] = on_ranks(1, _in_megatron, argv, moe, None, ids)
    close(found, logits(dense, ids))


@pytest.mark.parametrize(("kind", "named"), [
    ("olmoe", "clip_qkv=4.0"), ("olmoe, no clip", "q_norm.weight covers all heads"),
    ("mixtral", "window=24"), ("deepseek_v3", "latent="), ("deepseek_v2", "latent="),
])
def test_what_megatron_cannot_hold_is_named(kind: str, named: str, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("olmoe", clip_qkv=None) if "no clip" in kind else tiny(kind)
    model.save_pretrained(tmp_path / "hf")
    assert main(["reshard", str(tmp_path / "hf"), str(tmp_path / "there"), "--to",
                 "megatron"]) == 2
    assert named in capsys.readouterr().err


def close(got: Tensor, want: Tensor) -> None:
    """Equal within rounding of float32."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
