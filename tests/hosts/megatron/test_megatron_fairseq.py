"""A language model of fairseq becomes a checkpoint that Megatron's training script loads, and the
reverse; optimizer state included.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
pytest.importorskip("fairseq", reason="fairseq is not installed (see docs/fairseq.md)")

from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.base import CheckpointSizes, convert, formats, open_source
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Source
from moe_plugin.cli.main import main
from moe_plugin.hosts.fairseq.models import MoETransformerLanguageModel
from moe_plugin.hosts.fairseq.options import MoELanguageModelConfig
from tests.hosts.fairseq.small import dictionary
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import logits, losses_of, trained

pytestmark = [pytest.mark.megatron, pytest.mark.fairseq]
WORDS, LENGTH = 380, 32  # with fairseq's four words as many as the training script has for bytes
MODEL_FLAGS = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--ffn-hidden-size",
    "48", "--seq-length", str(LENGTH), "--micro-batch-size", "2", "--global-batch-size", "8",
    "--hidden-dropout", "0", "--attention-dropout", "0", "--log-interval", "1"]
RUN = ["--train-iters", "1", "--lr", "1e-3", "--mock-data"]
EXPERTS = ["--num-experts", "4", "--moe-ffn-hidden-size", "48", "--moe-router-dtype", "fp32"]
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
# settings of fairseq, flags of Megatron
CASES = {
    "dense": ({}, []),
    "experts": (MOE, EXPERTS),
    "every other layer, one expert": (
        {**MOE, "moe_freq": 2, "moe_top1_expert": True},
        [*EXPERTS, "--moe-layer-freq", "[0,1]", "--moe-router-topk", "1",
         "--moe-router-pre-softmax"]),
    "groups": ({**MOE, "moe_router": "group_limited", "moe_router_groups": "2",
                "moe_router_group_top_k": "1", "moe_router_normalize": "none",
                "moe_second_expert_policy": "all"},
               [*EXPERTS, "--moe-router-pre-softmax", "--moe-router-num-groups", "2",
                "--moe-router-group-topk", "1"]),
    "scaled embedding": ({**MOE, "no_scale_embedding": False},
                         [*EXPERTS, "--untie-embeddings-and-output-weights"]),
    "output of its own": ({"share_decoder_input_output_embed": False},
                          ["--untie-embeddings-and-output-weights"]),
}


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


def same(one: Source, other: Source) -> None:
    """Equal bit by bit."""
    assert dict(one.entries) == dict(other.entries)
    for key in one.entries:
        assert torch.equal(one.read(key), other.read(key)), key


def tokens() -> torch.Tensor:
    return torch.randint(4, 257, (2, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_fairseqs_in_megatron_and_the_file_comes_back(case: str, tmp_path: Path) -> None:
    settings, flags = CASES[case]
    model = write(tmp_path / "fairseq", settings)
    wanted = model(tokens())[0].detach()
    for to in ("megatron", *(["megatron_native"] if case == "experts" else [])):
        assert main(["reshard", str(tmp_path / "fairseq"), str(tmp_path / to), "--to", to]) == 0
        argv = [*MODEL_FLAGS, *flags, *RUN, *(["--native-moe"] if "native" in to else [])]
        [found] = on_ranks(1, logits, argv, str(tmp_path / to), tokens())
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        back = tmp_path / f"back-{to}"
        assert main(["reshard", str(tmp_path / to), str(back), "--to", "fairseq"]) == 0
        again = build({**settings, **({"no_scale_embedding": True,
                                       "share_decoder_input_output_embed": False}
                                      if case == "scaled embedding" else {})})
        state = files.read(str(back / "checkpoint_last.pt"))
        again.load_state_dict(state["model"])
        off = 1e-5 if case == "scaled embedding" else 0
        torch.testing.assert_close(again(tokens())[0], wanted, rtol=off, atol=off)
        if case != "scaled embedding":
            with open_source(tmp_path / "fairseq") as first, open_source(back) as second:
                same(first, second)


@pytest.mark.parametrize("case", ["dense", "experts"])
def test_optimizer_state_goes_to_a_run_of_megatron_and_back(case: str, data: str,
                                                            tmp_path: Path) -> None:
    settings, flags = CASES[case]
    write(tmp_path / "fairseq", settings, optimizer=True)
    assert main(["reshard", str(tmp_path / "fairseq"), str(tmp_path / "megatron"), "--to",
                 "megatron"]) == 0
    with open_source(tmp_path / "megatron") as source:
        fields = {field for field, _ in source.entries}
        assert fields == {MODEL, "exp_avg", "exp_avg_sq"}
        assert source.values["step"] == 3
        path = tmp_path / "back"
        path.mkdir()
        formats.get("fairseq")().write(convert(source, "fairseq"), path, CheckpointSizes())
    with open_source(tmp_path / "fairseq") as first, open_source(path) as second:
        same(first, second)
        assert first.values["parameters"] == second.values["parameters"]
        assert second.values["columns"]["step"] == dict.fromkeys(first.values["parameters"], 3)
        plain = tmp_path / "plain"
        plain.mkdir()
        formats.get("plain")().write(convert(first, "plain"), plain, CheckpointSizes())
        with open_source(plain) as third:
            same(first, again := convert(third, "fairseq"))
            assert again.values["columns"]["step"] == second.values["columns"]["step"]
    log = tmp_path / "log.jsonl"
    saved = tmp_path / "saved"
    on_ranks(1, trained, [
        *MODEL_FLAGS, *flags, "--data-path", data, "--train-iters", "5", "--lr", "1e-3", "--load",
        str(tmp_path / "megatron"), "--log-file", str(log), "--save", str(saved),
        "--save-interval", "5"])
    assert sorted(losses_of(str(log))) == [4, 5]  # the steps of fairseq count
    with open_source(saved) as trained_on, open_source(tmp_path / "megatron") as source:
        key = "exp_avg", "decoder.final_layernorm.weight"
        kept = trained_on.read(key) - 0.9**2 * source.read(key)
        assert float(kept.norm()) < float(source.read(key).norm())
        # norms ahead of experts have two names in what is converted
        assert set(trained_on.entries) <= set(source.entries)


REFUSED = {
    "post norm": ({"decoder_normalize_before": False}, "megatron", "pre_norm=False"),
    "ReLU": ({"activation_fn": "relu"}, "megatron", "activation='relu'"),
    "sinusoidal": ({"decoder_learned_pos": False}, "megatron", "positions='sinusoidal'"),
    "capacity": ({**MOE, "moe_capacity_factor": "1.0"}, "megatron",
                 "dispatch.capacity_factor=1.0"),
    "Mixtral": (MOE, "hf", r"norm is 'layernorm' and MLP has no gate and positions are 'learned'; "
                           r"train it in Megatron with --normalization RMSNorm --swiglu "
                           r"--position-embedding-type rope --disable-bias-linear \(fairseq's"),
    "groups by logits": ({**MOE, "moe_router": "group_limited", "moe_router_groups": "2",
                          "moe_router_group_top_k": "1", "moe_second_expert_policy": "all"},
                         "megatron", r"group_scores=2 \(must be 1 with softmax scores whose"),
    "layer norm of the embedding": ({"layernorm_embedding": True}, "megatron",
                                    "decoder.layernorm_embedding"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    settings, to, message = REFUSED[case]
    path = tmp_path / "fairseq"
    path.mkdir()
    torch.manual_seed(1)
    words = dictionary(WORDS)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    config = MoELanguageModelConfig(**{**SHAPE, **settings})
    model = MoETransformerLanguageModel.build_model(config, task)
    manifest = {"version": 1, "num_experts": 4, "world_size": 1, "rank": 0,
                "expert_parallel_size": 1, "num_updates": 0}
    files.write({"cfg": {"model": {**SHAPE, **settings}}, "model": model.state_dict(),
                 "extra_state": {}, **({files.MANIFEST: manifest} if "moe_freq" in settings
                                       else {})}, str(path / "checkpoint_last.pt"))
    with open_source(path) as source, pytest.raises(CheckpointError, match=message):
        convert(source, to)
