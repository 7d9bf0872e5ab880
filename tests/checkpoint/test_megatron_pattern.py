"""Checkpoints of Megatron's GPT models as those of hybrid ones, and back."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

import moe_plugin.checkpoint.formats.all  # noqa: F401 - registers
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats.base import open_source
from moe_plugin.checkpoint.formats.megatron.hybrid import pattern_of, with_pattern
from moe_plugin.checkpoint.source import MODEL, CheckpointError, DerivedSource, View, in_memory

pytestmark = pytest.mark.fast
PARTS = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.layer_norm_weight",
         "mlp.linear_fc1.layer_norm_weight", "mlp.router.weight")


def _gpt() -> DerivedSource:
    names = [f"decoder.layers.{n}.{part}" for n in (0, 1) for part in PARTS]
    names += ["decoder.layers.0.mlp.experts.w_in_LDF", "decoder.layers.1.mlp.linear_fc2.weight",
              "decoder.final_layernorm.weight", "embedding.word_embeddings.weight"]
    tensors = [in_memory((field, name), torch.full((2, 3, 4), float(i)))
               for i, name in enumerate(names) for field in (MODEL, "exp_avg")]
    args = argparse.Namespace(num_layers=2, moe_layer_freq=[1, 0], seed=5)
    return DerivedSource(
        tensors, "megatron", {"settings": {"num_layers": 2, "moe_layer_freq": [1, 0]}, "megatron": {
            "common": {"args": args}, "meta": {"model": {}}, "stacked": False, "objects": {
                "decoder.layers.1.mlp.linear_fc2._extra_state/shard_0_1": lambda: b"fp8 scales",
                "rng_state/shard_0_1": bytes}}},
        {"decoder.layers.0.mlp.": {"num_experts": 2}}, {}, [])


def test_every_tensor_changes_its_number_and_nothing_else() -> None:
    gpt = _gpt()
    hybrid = with_pattern(gpt, "*E|*-")
    assert hybrid.layers == {"decoder.layers.1.mlp.": {"num_experts": 2}}
    moved = {"decoder.layers.1.self_attention.linear_qkv.weight":
             "decoder.layers.2.self_attention.linear_qkv.weight",
             "decoder.layers.1.mlp.linear_fc2.weight": "decoder.layers.3.mlp.linear_fc2.weight",
             "decoder.layers.0.mlp.experts.w_in_LDF": "decoder.layers.1.mlp.experts.w_in_LDF",
             "decoder.final_layernorm.weight": "decoder.final_norm.weight"}
    for before, after in moved.items():
        for field in (MODEL, "exp_avg"):
            assert torch.equal(gpt.read((field, before)), hybrid.read((field, after)))
    assert len(hybrid.entries) == len(gpt.entries)
    assert hybrid.values["settings"]["num_layers"] == 4 and pattern_of(hybrid) == "*E|*-"
    kept = hybrid.values["megatron"]
    assert vars(kept["common"]["args"]) == {
        "num_layers": 4, "moe_layer_freq": 1, "hybrid_layer_pattern": "*E|*-", "seed": 5}
    assert "rng_state/shard_0_1" in kept["objects"] and "model" not in kept["meta"]
    assert "decoder.final_norm._extra_state/shard_0_1" in kept["objects"]
    assert kept["objects"]["decoder.layers.3.mlp.linear_fc2._extra_state/shard_0_1"]() == (
        b"fp8 scales")


def test_back_again_it_is_the_same() -> None:
    gpt = _gpt()
    again = with_pattern(with_pattern(gpt, "*E*-"), "")
    assert again.entries == gpt.entries and again.layers == gpt.layers
    assert all(torch.equal(again.read(key), gpt.read(key)) for key in gpt.entries)
    assert again.values["megatron"]["objects"][
        "decoder.layers.1.mlp.linear_fc2._extra_state/shard_0_1"]() == b"fp8 scales"
    assert again.values["settings"] == {"num_layers": 2, "moe_layer_freq": [1, 0],
                                        "hybrid_layer_pattern": None}


@pytest.mark.parametrize("pattern", ["*E*E", "*-*E", "M*E*-", "E*-*", "*E*-/*E"])
def test_another_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match=r"hybrid_layer_pattern=.* are '\*E\*-'"):
        with_pattern(_gpt(), pattern)


def test_what_is_no_gpt_model_stays_hybrid() -> None:
    source = _gpt()
    source.values["settings"]["hybrid_layer_pattern"] = "M*E"
    with pytest.raises(CheckpointError, match="'M\\*E' is not that of a GPT model"):
        with_pattern(source, "")


def test_objects_of_layers_that_are_alike_have_the_layer_in_front() -> None:
    alike = [f"decoder.layers.{n}.mlp.{part}" for n in (0, 1) for part in (
        "experts.experts.linear_fc1.weight", "fc1_latent_proj.weight")]
    objects = {f"decoder.layers.{name}._extra_state/shard_1{rest}": lambda name=name: name.encode()
               for name, rest in (("mlp.router", "_2"), ("self_attention.linear_qkv", "_2"),
                                  ("mlp.experts.experts.linear_fc1", ".0_2.1"))}
    gpt = DerivedSource(
        [in_memory((MODEL, name), torch.zeros(1, 2)) for name in alike], "megatron_native",
        {"settings": {"num_layers": 2}, "megatron": {"objects": objects, "stacked": True}},
        {f"decoder.layers.{n}.mlp.": {"num_experts": 1} for n in (0, 1)}, {}, [])
    hybrid = with_pattern(gpt, "*E*E")
    kept = hybrid.values["megatron"]["objects"]
    for name in ("3.mlp.router", "2.self_attention.linear_qkv", "3.mlp.experts.experts.linear_fc1"):
        assert kept[f"decoder.layers.{name}._extra_state/shard_0_1"]() == name[2:].encode()
    assert "decoder.layers.1.mlp.fc2_latent_proj._extra_state/shard_0_1" in kept
    again = with_pattern(hybrid, "").values["megatron"]
    assert again["stacked"] and all(again["objects"][name]() == read()
                                    for name, read in objects.items())
    assert not [name for name in again["objects"] if "decoder.layers.mlp.linear_fc" in name]


def test_what_megatron_wrote_under_the_older_name_of_a_pattern_is_hybrid() -> None:
    source = with_pattern(_gpt(), "*E*-")
    args = source.values["megatron"]["common"]["args"]
    for values in (source.values["settings"], vars(args)):
        values["hybrid_override_pattern"] = values.pop("hybrid_layer_pattern")
    assert pattern_of(source) == "*E*-"
    gpt = with_pattern(source, "")
    assert gpt.entries == _gpt().entries and not pattern_of(gpt)
    assert not hasattr(gpt.values["megatron"]["common"]["args"], "hybrid_override_pattern")


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("start", ["", "*E*-"])
def test_predictions_are_refused_both_ways(by_name: bool, start: str) -> None:
    source = with_pattern(_gpt(), start)
    if by_name:
        extra = in_memory((MODEL, "mtp.layers.0.enorm.weight"), torch.zeros(2))
        source = View(source, [*map(source.tensor, source.entries), extra])
    else:
        source.values["settings"]["mtp_num_layers"] = 1
    with pytest.raises(CheckpointError, match="has layers of multi-token prediction"):
        with_pattern(source, "" if start else "*E*-")


@pytest.mark.parametrize("pattern", ["*E*-", ""])
def test_from_another_format_arguments_are_written_that_name_the_pattern(
        tmp_path: Path, pattern: str) -> None:
    """Else Megatron takes the checkpoint for a GPT model's, and renames what it looks for."""
    source = _gpt()
    del source.values["megatron"]
    source.values |= {"consumed_samples": 64, "settings": {
        "num_layers": 2, "hidden_size": 3, "num_attention_heads": 1, "moe_plugin": {}}}
    target = tmp_path / "hybrid"
    assert Conversion(source, target, "megatron", pattern=pattern).run()
    common = torch.load(target / "iter_0000000" / "common.pt", weights_only=False)
    assert ("args" in common) == bool(pattern)
    if pattern:
        assert vars(common["args"]) == {
            "num_layers": 4, "hybrid_layer_pattern": pattern, "moe_layer_freq": 1,
            "hidden_size": 3, "num_attention_heads": 1, "consumed_train_samples": 64}


def test_as_a_gpt_model_it_becomes_any_format(tmp_path: Path) -> None:
    given = {"num_attention_heads": 1, "swiglu": False, "normalization": "LayerNorm",
             "norm_epsilon": 1e-5}
    gpt = DerivedSource(
        [in_memory((MODEL, f"decoder.layers.0.{name}.weight"), torch.zeros(shape))
         for name, shape in (("self_attention.linear_qkv", (12, 4)), ("mlp.linear_fc2", (4, 8)),
                             ("self_attention.linear_proj", (4, 4)))],
        "megatron", {"settings": {**given, "num_layers": 1}}, {}, {}, [])
    target = tmp_path / "plain"
    assert Conversion(with_pattern(gpt, "*-"), target, "plain", pattern="").run()
    with open_source(target) as source:
        assert any("layers.0.mlp.w_out.weight" in name for _, name in source.entries)
