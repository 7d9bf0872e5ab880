"""Every pair of checkpoint formats: there and back is bit for bit, or the refusal names the reason.

Each pair begins with a file of its first format, made of one model: a decoder of fairseq's with
Adam's state, Mixtral of `transformers`, one layer of Tutel's.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed (see docs/fairseq.md)")
pytest.importorskip("transformers", reason="needs pip install 'moe-plugin[hf]'")

import transformers

from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers all formats
from moe_plugin.checkpoint.formats.base import formats, open_source
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.cli.main import main
from moe_plugin.hosts.fairseq.models import MoETransformerLanguageModel
from moe_plugin.hosts.fairseq.options import MoELanguageModelConfig
from tests.hosts.fairseq.small import dictionary

pytestmark = pytest.mark.fairseq
DECODERS = ("fairseq", "fairseq_branch")
MIXTRAL = transformers.MixtralConfig(
    vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    max_position_embeddings=64)
GATED = ("plain", "hf", "megatron", "megatron_native")
WORDS, LENGTH = 380, 32
SHAPE: dict[str, Any] = {
    "activation_fn": "gelu", "decoder_embed_dim": 32, "decoder_input_dim": 32,
    "decoder_output_dim": 32, "decoder_ffn_embed_dim": 48, "decoder_layers": 2,
    "decoder_attention_heads": 4, "decoder_normalize_before": True, "dropout": 0.0,
    "decoder_learned_pos": True, "max_target_positions": LENGTH, "tokens_per_sample": LENGTH,
    "add_bos_token": False, "tpu": False, "no_scale_embedding": True,
    "share_decoder_input_output_embed": True,
}
MOE = {"moe_freq": 1, "moe_expert_count": 4, "moe_dispatch": "ragged",
       "moe_capacity_factor": "none"}


def build(settings: dict[str, Any]) -> MoETransformerLanguageModel:
    """A random model of fairseq; all its numbers differ from 0."""
    torch.manual_seed(1)
    words = dictionary(WORDS)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = MoETransformerLanguageModel.build_model(
        MoELanguageModelConfig(**{**SHAPE, **settings}), task)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        model.decoder.embed_positions.weight[:2] = 0  # rows of no position
    return model.eval()


def write(path: Path, settings: dict[str, Any], optimizer: bool = False) -> Any:
    """A file as fairseq's trainer writes it; returns the model."""
    model, (state, steps) = build(settings), ({}, 3)
    names = [name for name, _ in model.named_parameters()]
    moe = bool(settings.get("moe_freq"))
    state = {
        "args": None, "cfg": {"model": {**SHAPE, **settings}}, "model": model.state_dict(),
        "criterion": None, "task_state": {}, "optimizer_history": [{
            "criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam",
            "lr_scheduler_state": {"best": None}, "num_updates": steps}],
        "extra_state": {"metrics": {}, "train_iterator": {
            "version": 2, "epoch": 1, "iterations_in_epoch": 3, "shuffle": True}},
    }
    if optimizer:
        adam = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-6)
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            adam.step()
        found = adam.state_dict()
        for values in found["state"].values():
            values["step"] = int(values["step"])
        with torch.no_grad():
            model.decoder.embed_positions.weight[:2] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                found["state"][names.index("decoder.embed_positions.weight")][name][:2] = 0
        state["last_optimizer_state"] = found
        state["model"] = model.state_dict()
    if moe:
        state[files.MANIFEST] = {"version": 1, "num_experts": 4, "world_size": 1, "rank": 0,
                                 "expert_parallel_size": 1, "num_updates": steps,
                                 "parameters": names}
    path.mkdir(parents=True)
    files.write(state, str(path / "checkpoint_last.pt"))
    return model


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
        assert set(other.entries) == set(one.entries)
        if model == "decoder":
            assert {"exp_avg", "exp_avg_sq"} <= {field for field, _ in other.entries}


@pytest.mark.parametrize("to", sorted({*DECODERS, *GATED} - {"plain"}))
def test_one_layer_of_tutel_becomes_no_model(to: str, models: dict[str, Path], tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    path = models["tutel"] / "tutel"
    assert main(["reshard", str(path), str(tmp_path / "x"), "--to", to, "--from", "tutel"]) == 2
    assert "tutel" in capsys.readouterr().err.lower() and not (tmp_path / "x").exists()


@pytest.mark.parametrize(("model", "origin", "to", "why"), [
    *(("decoder", origin, to, f"cannot be converted to '{to}'")
      for origin in DECODERS for to in (*GATED, "tutel")),
    *(("mixtral", origin, to, "were removed; commit") for origin in GATED for to in DECODERS),
    *(("mixtral", origin, "tutel", "Tutel's layer has no counterpart") for origin in GATED)])
def test_what_the_other_format_cannot_hold_is_named(
        model: str, origin: str, to: str, why: str, models: dict[str, Path], tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    source = models[model] / origin
    assert main(["reshard", str(source), str(tmp_path / "x"), "--to", to]) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "x").exists()
