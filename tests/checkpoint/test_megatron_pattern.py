"""Checkpoints of Megatron's GPT models as those of hybrid ones, and back."""

from __future__ import annotations

import argparse

import pytest
import torch

from moe_plugin.checkpoint.formats.megatron.hybrid import pattern_of, with_pattern
from moe_plugin.checkpoint.source import MODEL, CheckpointError, DerivedSource, in_memory

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
                "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1": bytes,
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


def test_back_again_it_is_the_same() -> None:
    gpt = _gpt()
    again = with_pattern(with_pattern(gpt, "*E*-"), "")
    assert again.entries == gpt.entries and again.layers == gpt.layers
    assert all(torch.equal(again.read(key), gpt.read(key)) for key in gpt.entries)
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
