"""Flags of launch scripts written for Megatron's own training script, on CPU, and the defaults of
ours.

Also:

* Experts' biases have the names in Megatron's checkpoints that they always had; state dicts take
  both.
* A setting that a new Megatron calls otherwise is one line of `RENAMED`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging.handlers
import os
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.former_names import former
from tests.hosts.megatron.layers import Case, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import (
    MODEL,
    VERSION,
    Run,
    arguments_of,
    argv_for,
    parsed,
    refusal,
    trained,
    when_built,
)

# as in published launch scripts of models with experts, without tokenizer, paths and sizes
PUBLISHED = """--use-mcore-models --transformer-impl local --attention-backend fused
--max-position-embeddings 64 --position-embedding-type rope --rotary-base 1000000
--rotary-percent 0.5 --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights
--no-masked-softmax-fusion --no-rope-fusion --attention-softmax-in-fp32 --moe-grouped-gemm
--moe-permute-fusion --moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-fusion
--moe-router-topk 2 --moe-router-load-balancing-type aux_loss seq_aux_loss
--moe-aux-loss-coeff 0.01 0.001 --moe-shared-expert-intermediate-size 48 --moe-layer-freq ([0]+[1])
--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--accumulate-allreduce-grads-in-fp32 --sequence-parallel --recompute-activations
--cross-entropy-loss-fusion --manual-gc --distributed-backend nccl
--no-check-for-nan-in-loss-and-grad""".split()


def _run(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(last record, what was logged)"""
    handler = logging.handlers.BufferingHandler(1000)
    for name in ("moe_plugin", "moe_plugin.megatron"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("moe_plugin").addHandler(handler)
    return trained(argv), [entry.getMessage() for entry in handler.buffer]


def test_a_published_launch_script_needs_no_change(data: str) -> None:
    argv = argv_for(data, 2, *PUBLISHED)
    [(record, said)] = on_ranks(1, _run, argv)
    assert set(record["balance"]) == {"layer2"}
    assert {"seq_load_balancing_loss", "load_balancing_loss"} <= set(record["aux_losses"])
    [line] = [text for text in said if text.startswith("arguments ignored on CPU, because")]
    for name in ("--moe-permute-fusion", "--moe-token-dispatcher-type flex",
                 "--attention-backend fused", "--distributed-backend nccl"):
        assert name in line


def _sizes(argv: list[str]) -> tuple[str, int, int]:
    """(recomputed, learned positions, numbers that rotary positions turn)"""

    def sizes(run: Run) -> tuple[str, int, int]:
        bare = run.model
        learned = bare.embedding.position_embeddings.weight.shape[0] if hasattr(
            bare.embedding, "position_embeddings") else 0
        turned = 2 * bare.rotary_pos_emb.inv_freq.numel() if learned == 0 else 0
        return bare.config.recompute_granularity, learned, turned

    return when_built(argv, sizes)


def test_sizes_and_recomputation_have_megatrons_meaning(data: str) -> None:
    argv = argv_for(data, 1, "--recompute-activations")
    assert on_ranks(1, _sizes, argv) == [("selective", 32, 0)]
    rope = ["--position-embedding-type", "rope", "--rotary-percent", "0.5",
            "--max-position-embeddings", "64"]
    assert on_ranks(1, _sizes, [*argv, *rope]) == [("selective", 0, 4)]  # of 8 a head


def _unknown(local: str | None) -> tuple[object, str]:
    """Status and words of a process of rank 1 with a misspelled flag; local: its rank on the node.
    """
    os.environ["RANK"] = "1"
    os.environ.pop("LOCAL_RANK")
    os.environ.update({} if local is None else {"LOCAL_RANK": local})
    words = io.StringIO()
    with contextlib.redirect_stderr(words), mock.patch("time.sleep"), \
            pytest.raises(SystemExit) as ended:  # the others wait for the rank that says it
        parsed([*MODEL, "--moe-router-load-balancing-typ", "aux_loss"])
    return ended.value.code, words.getvalue()


def test_flags_that_megatron_replaces_lead_to_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Not to a flag with a similar name."""
    from moe_plugin.config.flags import setting_specs
    from moe_plugin.hosts.megatron.launch import chained
    from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS

    flags = {spec.flag: NATIVE_ARGUMENTS[spec.path] for spec in setting_specs()
             if NATIVE_ARGUMENTS.get(spec.path, spec.flag) != spec.flag}
    assert {"--moe-top-k", "--moe-router-score"} <= set(flags)
    parser = chained(None)(argparse.ArgumentParser(allow_abbrev=False))  # as Megatron's
    for flag, native in flags.items():
        with pytest.raises(SystemExit):
            parser.parse_args([flag, "1"])
        said = capsys.readouterr().err
        assert f"use {native} instead of {flag}" in said and "did you mean" not in said


def test_a_list_of_layers_is_written_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    from moe_plugin.hosts.megatron.launch import chained

    parser = chained(None)(argparse.ArgumentParser())
    parser.add_argument("--moe-layer-freq", type=int)
    with pytest.raises(SystemExit):
        parser.parse_args(["--moe-layer-freq", "0,1,0,1"])
    assert "write the list of layers as '[0,1,0,1]'" in capsys.readouterr().err


@pytest.mark.parametrize(("local", "said"), [(None, True), ("0", True), ("1", False)])
def test_what_is_not_known_is_said_with_what_is(local: str | None, said: bool) -> None:
    """In one line, though there are a thousand arguments, and once on a node."""
    [(status, shown)] = on_ranks(1, _unknown, local)
    assert status == 2 and shown.count("\n") == int(said)
    assert said == ("did you mean --moe-router-load-balancing-type" in shown), shown


def test_defaults_follow_what_is_given() -> None:
    """No evaluation where none is asked for; a checkpoint at the end; sizes of the data."""
    names = ("eval_iters", "eval_interval", "save_interval", "max_position_embeddings",
             "vocab_size", "make_vocab_size_divisible_by")
    found = {name: [getattr(arguments_of(argv), name) for argv in (
        [*MODEL, "--train-iters", "7"],
        [*MODEL, "--eval-interval", "5", "--vocab-size", "90", "--save-interval", "3"],
        [*MODEL, "--tokenizer-type", "GPT2BPETokenizer", "--skip-train",
         "--tensor-model-parallel-size", "6"])] for name in names}
    assert found == {"eval_iters": [0, 10, 10], "eval_interval": [1000, 5, 1000],
                     "save_interval": [7, 3, 10**9], "max_position_embeddings": [32] * 3,
                     "vocab_size": [257 if VERSION >= (0, 18) else 256, 90, None],
                     "make_vocab_size_divisible_by": [128, 128, 64]}


def test_other_learned_positions_than_saved_are_refused() -> None:
    """Of other positions their number says nothing about tensors."""
    from moe_plugin.hosts.megatron.model_settings import check_settings

    saved = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 64}
    mine = {**saved, "max_position_embeddings": 32}
    with pytest.raises(ValueError, match="has max_position_embeddings=64, but this run has .*=32"):
        check_settings("saved", saved, mine)
    turned = {"position_embedding_type": "rope"}
    check_settings("saved", {**saved, **turned}, {**mine, **turned})
    check_settings("saved", saved, saved)


def test_an_error_of_a_layer_ends_with_its_remedy(data: str) -> None:
    """Not with the classes that Megatron was building."""
    argv = argv_for(data, 1, "--moe-dispatch", "carrier_pigeon")
    [message] = on_ranks(1, refusal, argv)
    assert message.startswith("unknown dispatcher 'carrier_pigeon'") and message.endswith("ragged")


def _names(folder: str) -> tuple[dict[str, str], bool, bool]:
    """The sharded tensors' names by those in the layer; whether copies by a state dict and by a
    distributed checkpoint are equal.
    """
    from megatron.core import dist_checkpointing

    from moe_plugin.hosts.megatron.compat.checkpointing import saves_whose_writers_end, wrap

    wrap("save", saves_whose_writers_end)
    case = Case(gated=True, native={"add_bias_linear": True})
    initialise_parallel(case)
    layer, other, third = (build(case, True) for _ in range(3))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    state = former(layer.state_dict())
    assert "experts.b_gate_LF" in state
    other.load_state_dict(state)
    sharded = layer.sharded_state_dict("mlp.")
    dist_checkpointing.save(sharded, folder)
    third.load_state_dict({
        name.removeprefix("mlp."): value for name, value in
        dist_checkpointing.load(third.sharded_state_dict("mlp."), folder).items()})
    x = torch.randn(3, 2, 16)
    wanted = layer(x)[0]
    return ({name: shard.key for name, shard in sharded.items()}, torch.equal(wanted, other(x)[0]),
            torch.equal(wanted, third(x)[0]))


def test_names_of_biases(tmp_path: object) -> None:
    [(names, by_state, by_checkpoint)] = on_ranks(1, _names, str(tmp_path))
    assert by_state and by_checkpoint
    for part in ("in_LF", "gate_LF", "out_LD"):
        assert names[f"mlp.experts.bias_{part}"] == f"mlp.experts.b_{part}"


def test_neutral_names_of_biases() -> None:
    from moe_plugin.checkpoint.formats.megatron.neutral import _table
    from moe_plugin.checkpoint.neutral import DecoderSettings

    table = _table(DecoderSettings(
        heads=2, kv_heads=2, norm="rmsnorm", norm_eps=1e-5, activation="silu", gated=True,
        positions="rotary", tied=False))
    ours, theirs = "layers.1.moe.experts.bias_in_LF", "decoder.layers.1.mlp.experts.b_in_LF"
    assert table.neutral_name(theirs) == ours and table.their_names(ours, 2) == [theirs]


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Megatron that calls `moe_router_topk` otherwise, and the line that says so."""
    from moe_plugin.hosts.megatron.compat import settings

    monkeypatch.setitem(settings.RENAMED, "moe_router_topk", "moe_top_k")
    return settings


def _config() -> Any:
    from moe_plugin.hosts.megatron.compat.names import TransformerConfig

    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2,
                             num_moe_experts=4, moe_router_topk=3, add_bias_linear=False)


def _renamed() -> Any:
    """The same settings with `moe_top_k` in the place of `moe_router_topk`."""
    values = {"moe_top_k" if one.name == "moe_router_topk" else one.name:
              vars(_config())[one.name] for one in fields(_config())}
    return make_dataclass("TransformerConfig", values)(**values)


def test_layers_follow_it(newer: Any) -> None:
    from moe_plugin.hosts.megatron.translate import translate

    config = translate(_renamed(), {}).config
    assert config == translate(_config(), {}).config
    assert config.router.top_k == 3


def test_without_the_line_it_is_unknown() -> None:
    from moe_plugin.hosts.megatron.translate import translate

    with pytest.raises(AttributeError, match="moe_router_topk"):
        translate(_renamed(), {})


def test_the_settings_file_follows_it(newer: Any, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer name that is not the name of one of our own flags."""
    from moe_plugin.hosts.megatron.file_arguments import reads_file

    monkeypatch.setitem(newer.RENAMED, "moe_router_topk", "moe_router_top_k")
    (tmp_path / "moe.yaml").write_text("router: {top_k: 3}\n")
    parser = argparse.ArgumentParser()
    parser.add_argument("--moe-config")
    parser.add_argument("--moe-router-top-k", type=int, default=2)
    parsed = reads_file(parser).parse_args(["--moe-config", str(tmp_path / "moe.yaml")])
    assert parsed.moe_router_top_k == 3


def test_checkpoints_follow_it(newer: Any) -> None:
    """Not the default of 2, which would change what a converted model computes."""
    from moe_plugin.checkpoint.formats.megatron.source import plain_settings

    for given, wanted in (({"moe_top_k": 3}, 3), ({"moe_router_topk": 4, "moe_top_k": 3}, 4)):
        assert plain_settings(argparse.Namespace(**given))["moe_router_topk"] == wanted


def test_calls_pass_it_on(newer: Any) -> None:
    from moe_plugin.hosts.megatron.compat.core import call_supported

    def build(moe_top_k: int) -> int:
        return moe_top_k

    assert call_supported(build, moe_router_topk=3, of_another_version=1) == 3


def test_arguments_of_the_script_follow_it(newer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(moe_top_k=3))
    monkeypatch.setitem(newer.sys.modules, "megatron.training.global_vars", arguments)
    assert newer.script_arguments()["moe_router_topk"] == 3
