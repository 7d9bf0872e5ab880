"""Megatron's arguments in the file of `--moe-config`, and single settings on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.config.flags import add_arguments
from moe_plugin.hosts.megatron.file_arguments import file_arguments, reads_file
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS, settings_from_flags

pytestmark = [pytest.mark.megatron, pytest.mark.fast]
FILE = """
megatron:
  num_layers: 4
  lr: 1e-3
  moe-router-load-balancing-type: [aux_loss, seq_aux_loss]
  moe_layer_freq: "([0]+[1])"
  swiglu: true
  add_bias_linear: false
  no_rope_fusion: true
  create_attention_mask: false
  save:
  vocab_size: -1
router: {fp32: true}
observe: {interval: 10}
"""


def _parser() -> argparse.ArgumentParser:
    """With arguments of each kind that Megatron has, and ours."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add = parser.add_argument
    add("--num-layers", type=int)
    add("--vocab-size", type=int)
    add("--lr", type=float)
    add("--save")
    add("--moe-layer-freq", default=1)
    add("--moe-router-load-balancing-type", nargs="+",
        choices=["aux_loss", "seq_aux_loss", "sinkhorn"], default="aux_loss")
    add("--swiglu", action="store_true")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    add("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    add("--create-attention-mask", action=argparse.BooleanOptionalAction, default=True)
    add_arguments(parser, NATIVE_ARGUMENTS)
    return parser


def _parsed(tmp_path: Path, *words: str, text: str = FILE) -> dict[str, Any]:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return vars(reads_file(_parser()).parse_args(["--moe-config", str(path), *words]))


def test_the_file_has_arguments_of_both(tmp_path: Path) -> None:
    args = _parsed(tmp_path)
    assert {name: args[name] for name in (
        "num_layers", "lr", "moe_router_load_balancing_type", "moe_layer_freq", "swiglu",
        "add_bias_linear", "apply_rope_fusion", "create_attention_mask", "save", "vocab_size"
    )} == {
        "num_layers": 4, "lr": 1e-3, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_layer_freq": "([0]+[1])", "swiglu": True, "add_bias_linear": False,
        "apply_rope_fusion": False, "create_attention_mask": False, "save": None, "vocab_size": -1}
    assert settings_from_flags(args) == {"router.fp32": True, "observe.interval": 10}


def test_overrides_beat_the_file_and_flags_beat_both(tmp_path: Path) -> None:
    words = ["megatron.num_layers=8", "megatron.swiglu=false", "megatron.lr=2e-3", "--lr", "3e-3",
             "megatron.moe_router_load_balancing_type=[sinkhorn]", "router.fp32=false",
             "router.noise=0.5", "--moe-stats-interval", "3"]
    args = _parsed(tmp_path, *words)
    assert (args["num_layers"], args["lr"], args["swiglu"]) == (8, 3e-3, False)
    assert args["moe_router_load_balancing_type"] == ["sinkhorn"]
    assert settings_from_flags(args) == {"router.fp32": False, "router.noise": 0.5,
                                         "observe.interval": 3}


def test_a_switch_is_what_the_file_says_where_defaults_were_changed() -> None:
    """Before the section is read, as by a script, and after it, as for a run on CPU."""
    words = ["megatron.apply_rope_fusion=true", "megatron.swiglu=false",
             "megatron.disable_bias_linear=false"]
    parser = reads_file(_parser())
    parser.set_defaults(apply_rope_fusion=False, swiglu=True, add_bias_linear=False)
    args = parser.parse_args(words)
    assert (args.apply_rope_fusion, args.swiglu, args.add_bias_linear) == (True, False, True)
    given = parser.parse_args([*words, "--no-rope-fusion", "--swiglu", "--disable-bias-linear"])
    assert (given.apply_rope_fusion, given.swiglu, given.add_bias_linear) == (False, True, False)


def test_overrides_need_no_file() -> None:
    found = file_arguments(["megatron.num_layers=2", "--save", "a.b=c"])
    assert found.words == ["--save", "a.b=c"]  # not a setting
    args = reads_file(_parser()).parse_args(["megatron.num_layers=2", "--save", "a.b=c"])
    assert (args.num_layers, args.save) == (2, "a.b=c")


@pytest.mark.parametrize(("words", "text", "error"), [
    ((), "megatron: {num_layrs: 4}", r"megatron.num_layrs of '.*settings.yaml' is not an argument "
     "of this script; did you mean num_layers"),
    (("megatron.num_layer=4",), "", "megatron.num_layer of .* did you mean num_layers"),
    (("router.fp23=true",), "", "unknown key 'router.fp23'; did you mean router.fp32"),
    (("router.top_k=1",), "", "router.top_k='1' cannot be set here, because Megatron has.*"
     "--moe-router-topk"),
    ((), "megatron: {moe_router_noise: 0.1}", "is a setting of moe-plugin. Write it as "
     "router.noise outside the section"),
    ((), "megatron: [num_layers]", "must be a mapping of Megatron's arguments"),
    ((), "megatron: {swiglu: 3}", "megatron.swiglu.*=3 must be true or false"),
    ((), "megatron: {lr: {a: 1}}", "must be a single value or a list"),
    (("--yaml-cfg", "x.yaml"), "", "--yaml-cfg cannot be used with moe-plugin's launcher.*section "
     "megatron of a YAML file")])
def test_what_cannot_be_read_is_named(words: tuple[str, ...], text: str, error: str,
                                      tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=error):
        _parsed(tmp_path, *words, text=text)


def test_types_and_choices_are_megatrons(tmp_path: Path, capsys: Any) -> None:
    for text, error in (("num_layers: x", "--num-layers: invalid int value: 'x'"),
                        ("moe_router_load_balancing_type: [other]", "invalid choice: 'other'")):
        with pytest.raises(SystemExit):
            _parsed(tmp_path, text=f"megatron: {{{text}}}")
        assert error in capsys.readouterr().err


def test_the_section_of_fairseq_is_left_to_fairseq(tmp_path: Path) -> None:
    args = _parsed(tmp_path, text="fairseq: {lr: 3}\nmegatron: {lr: 2}\n")
    assert args["lr"] == 2


def test_our_settings_become_megatrons_arguments(tmp_path: Path) -> None:
    """What the command line gives stays; what Megatron has no argument for is left out."""
    text = ("num_experts: 8\nmodel_dim: 64\nrouter: {top_k: 1, scaling: 2.5, fp32: true}\n"
            "experts: {kind: gated_ffn, activation: silu, bias: false, hidden_dim: 24}\n")
    parser = _parser()
    for name, kind in (("num-experts", int), ("hidden-size", int), ("moe-router-topk", int),
                       ("moe-ffn-hidden-size", int), ("moe-router-topk-scaling-factor", float)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--moe-router-pre-softmax", action="store_true")
    (tmp_path / "moe.yaml").write_text(text)
    args = vars(reads_file(parser).parse_args(
        ["--moe-config", str(tmp_path / "moe.yaml"), "--num-experts", "4"]))
    expected = {"num_experts": 4, "hidden_size": 64, "moe_router_topk": 1, "swiglu": True,
                "moe_router_topk_scaling_factor": 2.5, "add_bias_linear": False,
                "moe_ffn_hidden_size": 24, "moe_router_pre_softmax": True}
    assert {name: args[name] for name in expected} == expected
