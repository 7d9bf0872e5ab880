"""Hugging Face models, Megatron's checkpoints of our layers and what is stored in 16 bit: the same
logits in both directions, and every value bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs pip install 'moe-plugin[hf]'")
import transformers

import moe_plugin.checkpoint.formats.all  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.base import CheckpointSizes, convert, formats, open_source
from moe_plugin.checkpoint.source import MODEL as FIELD
from moe_plugin.checkpoint.source import Source
from moe_plugin.cli.main import main
from tests.checkpoint.hf_models import logits, tiny, tokens
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import (
    Run,
    argv_for,
    losses_of,
    refusal,
    trained,
    when_built,
)
from tests.hosts.megatron.training import logits as logits_in_megatron

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
        [found] = on_ranks(1, logits_in_megatron, argv, str(path), tokens_BT)
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
    [found] = on_ranks(1, logits_in_megatron, [*ARGUMENTS, *GLM], str(root), tokens_BT)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with open_source(root) as source:
        back = _written(convert(source, "hf"), tmp_path / "back")
    again = transformers.Glm4MoeForCausalLM.from_pretrained(back).eval()
    assert torch.equal(again(tokens_BT).logits, wanted)


GPT = [
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


@pytest.mark.parametrize("kind", CASES)
def test_logits_are_equal_in_both_directions(kind: str, tmp_path: Path) -> None:
    settings, more = CASES[kind]
    theirs = tiny(kind, vocab_size=128, rope_theta=10000.0, **settings)
    theirs.save_pretrained(tmp_path / "hf")
    there, trained, back = (str(tmp_path / name) for name in ("there", "trained", "back"))
    assert main(["reshard", str(tmp_path / "hf"), there, "--to", "megatron"]) == 0
    ids = tokens(theirs)
    [(first, second)] = on_ranks(1, _in_megatron, [*GPT, *more], there, trained, ids)
    _close(first, logits(theirs, ids))
    assert not torch.allclose(second, first, rtol=1e-3)
    assert main(["reshard", trained, back, "--to", "hf", "--model-only"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert type(again) is type(theirs)
    _close(logits(again, ids), second)


def test_a_dense_checkpoint_of_megatron_becomes_experts(tmp_path: Path) -> None:
    dense = tiny("llama", vocab_size=128, rms_norm_eps=1e-5)
    dense.save_pretrained(tmp_path / "hf")
    there, moe = str(tmp_path / "there"), str(tmp_path / "moe")
    assert main(["reshard", str(tmp_path / "hf"), there, "--to", "megatron"]) == 0
    assert main(["upcycle", there, moe, "--experts", "6", "--top-k", "4", "--granularity",
                 "2"]) == 0
    argv = [*GPT, "--num-experts", "6", "--moe-ffn-hidden-size", "24", "--moe-router-topk", "4"]
    ids = tokens(dense)
    [(found,)] = on_ranks(1, _in_megatron, argv, moe, None, ids)
    _close(found, logits(dense, ids))


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


def _close(got: Tensor, want: Tensor) -> None:
    """Equal within rounding of float32."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OTHERS = ("megatron_native", "plain")


def _check_masters(source: Source, dtype: torch.dtype, exact: bool = True) -> None:
    """Each 16-bit weight with optimizer state has an fp32 copy that rounds to it; exact: is it."""
    masters = {name for field, name in source.entries if field == "master"}
    assert masters == {name for field, name in source.entries if field == "exp_avg"
                       and source.entries[FIELD, name].dtype != torch.float32}
    assert masters
    differs = False
    for name in masters:
        copy, weight = source.read(("master", name)), source.read((FIELD, name))
        assert copy.dtype == torch.float32 and weight.dtype == dtype
        assert torch.equal(copy.to(dtype), weight), name
        differs |= not torch.equal(copy, weight.float())
    assert differs != exact


@pytest.mark.parametrize(("name", "flags", "through"), [
    ("bf16", ["--bf16"], OTHERS),
    ("bf16", ["--bf16", "--use-distributed-optimizer"], OTHERS[:1]),
    ("fp16", ["--fp16", "--initial-loss-scale", "128"], OTHERS[:1]),
], ids=["bf16", "bf16, distributed", "fp16"])
def test_a_run_in_16_bit_goes_through_every_format_and_on(
        name: str, flags: list[str], through: tuple[str, ...], data: str, tmp_path: Path) -> None:
    """Master weights, which differ from the rounded ones, and losses bit for bit; no other format
    than Megatron's has the place in the data.
    """
    argv = argv_for(data, 4, *flags)
    home = tmp_path / "run"
    on_ranks(1, trained, [*argv, "--save", str(home), "--save-interval", "2"])
    (home / "latest_checkpointed_iteration.txt").write_text("2")
    with open_source(home) as source:
        _check_masters(source, DTYPES[name], exact=False)
        back: Any = source
        for number, other in enumerate((*through, "megatron")):
            with open_source(_written(convert(back, other), tmp_path / str(number))) as read:
                _check_masters(read, DTYPES[name], exact=False)
                if other == "megatron":
                    for key in source.entries:
                        assert read.entries[key] == source.entries[key], key
                        assert torch.equal(read.read(key), source.read(key)), key
            back = open_source(tmp_path / str(number))
    losses = []
    for number, folder in enumerate((home, tmp_path / str(len(through)))):
        log = tmp_path / f"{number}.jsonl"
        on_ranks(1, trained, [*argv, "--load", str(folder), "--log-file", str(log)])
        losses.append(losses_of(str(log)))
    assert sorted(losses[0]) == sorted(losses[1]) == [3, 4]
    assert "plain" in through or losses[0] == losses[1]
