"""Every pair of checkpoint formats: there and back is bit for bit, or the refusal names the reason.

Each pair begins with a file of its first format, made of one model: a decoder of fairseq's with
Adam's state, Mixtral of `transformers`, one layer of Tutel's.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
pytest.importorskip("fairseq", reason="fairseq is not installed (see docs/fairseq.md)")
pytest.importorskip("transformers", reason="needs pip install 'moe-plugin[hf]'")

import transformers

from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers all formats
from moe_plugin.checkpoint.formats.base import formats, open_source
from moe_plugin.cli.main import main
from tests.hosts.megatron.test_megatron_fairseq import MOE, write

pytestmark = [pytest.mark.megatron, pytest.mark.fairseq]
DECODERS = ("plain", "fairseq", "fairseq_branch", "megatron", "megatron_native")
MIXTRAL = transformers.MixtralConfig(
    vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    max_position_embeddings=64)
GATED = ("plain", "hf", "megatron", "megatron_native")


def reshard(source: Path, target: Path, to: str) -> Path:
    assert main(["reshard", str(source), str(target), "--to", to]) == 0, (source.name, to)
    return target


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By model a folder, in which each format's checkpoint has the format's name."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("decoder", "mixtral", "tutel")}
    write(found["decoder"] / "fairseq", MOE, optimizer=True)
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(MIXTRAL).save_pretrained(found["mixtral"] / "hf")
    for name, made, all_formats in (("decoder", "fairseq", DECODERS), ("mixtral", "hf", GATED)):
        for to in all_formats:
            if to != made:
                reshard(found[name] / made, found[name] / to, to)
    layer = {"gates.0.wg.weight": torch.randn(4, 8), "experts.batched_fc1_w": torch.randn(4, 16, 8),
             "experts.batched_fc2_w": torch.randn(4, 16, 8)}
    (found["tutel"] / "tutel").mkdir()
    torch.save({f"moe.{key}": value for key, value in layer.items()},
               found["tutel"] / "tutel" / "0.pt")
    return found


def test_every_format_is_in_a_pair() -> None:
    assert {*DECODERS, *GATED, "tutel"} == set(formats.names())


@pytest.mark.parametrize(("model", "first", "second"), [
    *(("decoder", *pair) for pair in itertools.permutations(DECODERS, 2)),
    *(("mixtral", *pair) for pair in itertools.permutations(GATED, 2))])
def test_there_and_back_is_bit_for_bit(model: str, first: str, second: str,
                                       models: dict[str, Path], tmp_path: Path) -> None:
    there = reshard(models[model] / first, tmp_path / "there", second)
    back = reshard(there, tmp_path / "back", first)
    with open_source(models[model] / first) as one, open_source(back) as other:
        assert one.format == other.format == first
        for key, entry in one.entries.items():
            assert other.entries[key] == entry and torch.equal(one.read(key), other.read(key)), key
        # Megatron has biases in all linear maps or in none; those that are new are zero
        more = set(other.entries) - set(one.entries)
        assert not more or (model, first) == ("decoder", "plain") and "megatron" in second
        for key in more:
            assert key[1].endswith(".router.bias") and not other.read(key).any(), key
        if model == "decoder":
            assert {"exp_avg", "exp_avg_sq"} <= {field for field, _ in other.entries}


@pytest.mark.parametrize("to", sorted({*DECODERS, *GATED} - {"plain"}))
def test_one_layer_of_tutel_becomes_no_model(to: str, models: dict[str, Path], tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    path = models["tutel"] / "tutel"
    assert main(["reshard", str(path), str(tmp_path / "x"), "--to", to, "--from", "tutel"]) == 2
    assert "tutel" in capsys.readouterr().err.lower() and not (tmp_path / "x").exists()


@pytest.mark.parametrize(("model", "origin", "to", "why"), [
    ("decoder", "fairseq", "hf", "layernorm"), ("mixtral", "hf", "fairseq", "norm"),
    ("mixtral", "hf", "fairseq_branch", "norm"), ("mixtral", "hf", "tutel", "tutel"),
    ("decoder", "megatron", "tutel", "tutel"), ("decoder", "fairseq", "tutel", "tutel")])
def test_what_the_other_format_cannot_hold_is_named(
        model: str, origin: str, to: str, why: str, models: dict[str, Path], tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    source = models[model] / origin
    assert main(["reshard", str(source), str(tmp_path / "x"), "--to", to]) == 2
    assert why in capsys.readouterr().err.lower() and not (tmp_path / "x").exists()
