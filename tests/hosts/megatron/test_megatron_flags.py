"""Flags of launch scripts written for Megatron's own training script, in ours."""

from __future__ import annotations

import argparse
import logging.handlers
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL, refusal, trained

pytestmark = pytest.mark.megatron
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
--cross-entropy-loss-fusion --manual-gc --num-workers 6 --distributed-backend nccl
--no-check-for-nan-in-loss-and-grad""".split()


def _run(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(last record, what was logged)"""
    handler = logging.handlers.BufferingHandler(1000)
    for name in ("moe_plugin", "moe_plugin.megatron"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("moe_plugin").addHandler(handler)
    return trained(argv), [entry.getMessage() for entry in handler.buffer]


def test_a_published_launch_script_needs_no_change(data: str) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", *PUBLISHED]
    [(record, said)] = on_ranks(1, _run, argv)
    assert set(record["balance"]) == {"layer2"}
    assert {"seq_load_balancing_loss", "load_balancing_loss"} <= set(record["aux_losses"])
    [line] = [text for text in said if "have no effect in this script" in text]
    for name in ("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-token-dispatcher-type flex",
                 "--attention-backend", "--num-workers", "--no-rope-fusion"):
        assert name in line
    assert any("--sequence-parallel is left out" in text for text in said)


def _sizes(argv: list[str]) -> tuple[str, int, int]:
    """(recomputed, learned positions, numbers that rotary positions turn)"""
    from moe_plugin.hosts.megatron.trainer import arguments, model
    from moe_plugin.hosts.megatron.trainer import train as script

    args = arguments.parser().parse_args(argv)
    script.start(args)
    config = arguments.transformer_config(args, cpu=True)
    [bare] = model.build(args, config, arguments.our_settings(args), 257).bare()
    learned = bare.embedding.position_embeddings.weight.shape[0] if hasattr(
        bare.embedding, "position_embeddings") else 0
    turned = 2 * bare.rotary_pos_emb.inv_freq.numel() if learned == 0 else 0
    return config.recompute_granularity, learned, turned


def test_sizes_and_recomputation_have_megatrons_meaning(data: str) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "1", "--recompute-activations",
            "--max-position-embeddings", "64"]
    assert on_ranks(1, _sizes, argv) == [("selective", 64, 0)]
    rope = ["--position-embedding-type", "rope", "--rotary-percent", "0.5"]
    assert on_ranks(1, _sizes, [*argv, *rope]) == [("selective", 0, 4)]  # of 8 a head


@pytest.mark.parametrize("after", [False, True])
def test_recompute_activations_wins_over_the_granularity(after: bool) -> None:
    """In whatever order they are given, with `follow` and without."""
    from moe_plugin.hosts.megatron.trainer import arguments, copied_flags

    words = ["--recompute-granularity", "full", "--recompute-activations"]
    needed = [*MODEL, "--data-path", "x", "--train-iters", "1"]
    args = arguments.parser().parse_args([*needed, *(words[2:] + words[:2] if after else words)])
    assert copied_flags.recompute_granularity(args) == "selective"
    copied_flags.follow(args)
    assert args.recompute_granularity == "selective"
    args = arguments.parser().parse_args([*needed, *words[:2]])
    del args.recompute_activations  # a namespace of an earlier release
    assert copied_flags.recompute_granularity(args) == "full"


@pytest.mark.fast
@pytest.mark.parametrize(("text", "layers"), [
    ("2", 2), ("0,1,0", [0, 1, 0]), ("[1,0]", [1, 0]), ("([0]+[1]*3)", [0, 1, 1, 1]),
    ("([0]*2+[1]*1)*2", [0, 0, 1, 0, 0, 1]), ("2*[1]", [1, 1]), (" ([0]+[1]) ", [0, 1])])
def test_layers_with_experts_in_megatrons_form(text: str, layers: int | list[int]) -> None:
    from moe_plugin.hosts.megatron.trainer.copied_flags import layer_freq

    assert layer_freq(text) == layers


@pytest.mark.fast
@pytest.mark.parametrize("text", ["x", "0,2", "[2]", "[1]*99999999", "([1]", "[1]+2", "[1]**2",
                                  "[[1]]", "[__import__('os').getpid()]", "[1.0]", "",
                                  "[1]*9999+[1]*9999"])
def test_other_layers_are_refused(text: str) -> None:
    from moe_plugin.hosts.megatron.trainer.copied_flags import layer_freq

    with pytest.raises(argparse.ArgumentTypeError, match="is neither a number n >= 1"):
        layer_freq(text)


@pytest.mark.parametrize("text", ["[1]" + " " * 10**4 + "+x", "[" * 10**5,
                                  "+".join(["[1]"] * 1000)],
                         ids=["cut it would fit", "nested", "terms"])
def test_long_layers_are_refused_whole(text: str) -> None:
    from moe_plugin.hosts.megatron.trainer.copied_flags import layer_freq

    with pytest.raises(argparse.ArgumentTypeError, match=r"is too long: .* write \[1\]\*3"):
        layer_freq(text)


WRONG = {
    "too few layers": (["--moe-layer-freq", "[1]"], ("moe_layer_freq=[1]", "num_layers=2")),
    "no layers": (["--moe-layer-freq", "0"], ("moe_layer_freq=0", ">= 1")),
    "few positions": (["--max-position-embeddings", "8"],
                      ("max_position_embeddings=8", "seq_length=32")),
    "no rotary positions": (["--rotary-percent", "0"], ("rotary_percent=0.0", "> 0 and <= 1")),
    "more than all rotary": (["--rotary-percent", "1.5"], ("rotary_percent=1.5", "> 0 and <= 1")),
    "a coefficient too many": (["--moe-aux-loss-coeff", "0.01", "0.001"],
                               ("moe_aux_loss_coeff=[0.01, 0.001]", "must be 1", "'aux_loss'")),
    "a coefficient too few": (["--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss"],
                              ("moe_aux_loss_coeff=0.01", "must be 2", "'seq_aux_loss'")),
    "a type twice": (["--moe-router-load-balancing-type", "aux_loss", "aux_loss",
                      "--moe-aux-loss-coeff", "0.01", "0.001"],
                     ("moe_router_load_balancing_type=['aux_loss', 'aux_loss']", "sum")),
    "another package": (["--native-moe", "--moe-permute-fusion"], ("fused",)),
    "newer balancing": (["--moe-router-load-balancing-type", "quantile_balancing",
                         "--moe-aux-loss-coeff", "0"],
                        ("moe_router_load_balancing_type='quantile_balancing'", "sinkhorn")),
    "newer balancing, natively": (["--moe-router-load-balancing-type", "quantile_balancing",
                                   "--moe-aux-loss-coeff", "0", "--native-moe"],
                                  ("moe_router_load_balancing_type='quantile_balancing'",)),
}


@pytest.mark.parametrize(("extra", "parts"), WRONG.values(), ids=WRONG.keys())
def test_values_that_do_not_fit_are_named(extra: list[str], parts: tuple[str, ...],
                                          data: str) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    if "quantile_balancing" in extra and hasattr(TransformerConfig,
                                                 "moe_router_quantile_balancing_ema"):
        pytest.skip("this Megatron has it")
    argv = [*MODEL, "--data-path", data, "--train-iters", "1", *extra]
    [message] = on_ranks(1, refusal, argv)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(("argv", "parts"), [
    (["--tokenizer-type", "GPT2BPETokenizer"], ("in place of --tokenizer-type", "--vocab-size")),
    (["--train-samples=5", "--qk-clip"], ("in place of --train-samples: use --train-iters",
                                          "moe_plugin.hosts.megatron.launch")),
    (["--moe-router-load-balancing-type", "aux"], ("invalid choice: 'aux'", "seq_aux_loss"))])
def test_what_is_not_known_is_said_with_what_is(argv: list[str], parts: tuple[str, ...],
                                                monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """In few lines, though there are 200 arguments, and once on a node."""
    from moe_plugin.hosts.megatron.trainer import arguments

    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("time.sleep", lambda _: None)  # for the rank that says it
    for rank, said in ((None, True), ("0", True), ("1", False)):
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            arguments.parser().parse_args([*MODEL, "--data-path", "x", "--train-iters", "1", *argv])
        shown = capsys.readouterr().err
        assert ended.value.code == 2 and bool(shown) is said
        assert not said or (all(part in shown for part in parts) and shown.count("\n") == 1), shown


def _said(argv: list[str], monkeypatch: pytest.MonkeyPatch,
          capsys: pytest.CaptureFixture[str]) -> str:
    from moe_plugin.hosts.megatron.trainer import arguments

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit):
        arguments.parser().parse_args([*MODEL, *argv])
    return capsys.readouterr().err


def test_every_hint_of_a_real_script_is_shown_once(monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    folder = "/of/some/length" * 8
    shown = _said(["--data-path", "x", "--train-iters", "1", "--tokenizer-type", "GPT2BPETokenizer",
                   "--vocab-file", f"{folder}/vocab.json", "--merge-file", f"{folder}/merges.txt",
                   "--tensorboard-dir", folder, "--ckpt-format", "torch_dist",
                   "--log-timers-to-tensorboard"], monkeypatch, capsys)
    assert "moe_plugin.hosts.megatron.launch" in shown and shown.count("--vocab-size") == 1
    assert "in place of --tokenizer-type, --vocab-file, --merge-file: give the data" in shown
    assert "in place of --tensorboard-dir: use --moe-stats-tensorboard FOLDER (all" in shown


@pytest.mark.parametrize(("argv", "missing", "hint"), [
    (["--train-iters", "1", "--mock-data"], "--data-path", "in place of --mock-data: make data of"),
    (["--data-path", "x", "--train-samples", "5"], "--train-iters",
     "in place of --train-samples: use --train-iters")])
def test_a_missing_flag_is_said_with_the_one_given_for_it(
        argv: list[str], missing: str, hint: str, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    shown = _said(argv, monkeypatch, capsys)
    assert f"the following arguments are required: {missing}; {hint}" in shown


def test_other_learned_positions_than_saved_are_refused() -> None:
    """Of other positions their number says nothing about tensors."""
    from moe_plugin.hosts.megatron.model_settings import check_settings

    saved = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 64}
    mine = {**saved, "max_position_embeddings": 32}
    with pytest.raises(ValueError, match="has max_position_embeddings=64, this run has .*=32;"):
        check_settings("saved", saved, mine)
    turned = {"position_embedding_type": "rope"}
    check_settings("saved", {**saved, **turned}, {**mine, **turned})
    check_settings("saved", saved, saved)


def test_an_error_of_a_layer_ends_with_its_remedy(data: str) -> None:
    """Not with the classes that Megatron was building."""
    argv = [*MODEL, "--data-path", data, "--train-iters", "1", "--moe-dispatch", "carrier_pigeon"]
    [message] = on_ranks(1, refusal, argv)
    assert message.startswith("unknown dispatcher 'carrier_pigeon'") and message.endswith("ragged")
