"""Every setting of MoE layers of the installed Megatron has a row that says what becomes of it.

Also:

* Megatron's arguments in the file of `--moe-config`, and single settings on the command line.
* Writing a dataset: regular files only, complete or not at all.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import typing
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_plugin.config.flags import add_arguments
from moe_plugin.hosts.megatron import refusals
from moe_plugin.hosts.megatron.compat.fields import (
    ARGUMENTS,
    FIELDS,
    By,
    names,
    of_experts,
    refuse_unknown_arguments,
    without_effect,
    without_row,
)
from moe_plugin.hosts.megatron.file_arguments import file_arguments, reads_file
from moe_plugin.hosts.megatron.launch import extra_args_provider
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS, settings_from_flags, translate
from tests.hosts.test_refusals import names_read

pytestmark = pytest.mark.fast
BASE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 4,
        "add_bias_linear": False, "moe_aux_loss_coeff": 0.01}


def _config(**given: Any) -> Any:
    from moe_plugin.hosts.megatron.compat.names import TransformerConfig

    config = TransformerConfig(**BASE)  # its own checks would refuse half of the values
    for name, value in given.items():
        setattr(config, name, value)
    return config


def test_no_setting_of_the_config_lacks_a_row() -> None:
    found = [one.name for one in fields(_config())]
    assert sum(map(of_experts, found)) > 40
    assert without_row(found) == [], "give each a row in hosts/megatron/compat/fields.py"


def test_no_flag_lacks_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing, "override", lambda method: method, raising=False)  # Python 3.11
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    found = [action.dest for action in parser._actions]
    assert "moe_router_topk" in found
    assert without_row(found, {**FIELDS, **ARGUMENTS}) == [], \
        "give each a row in hosts/megatron/compat/fields.py"


# names in the table of refusals: what a check adds, and settings of other versions of Megatron
FACTS = {"asked", "batch_invariant", "cuts", "dense_at_end", "first_tp", "indivisible", "last_tp",
         "layouts", "losses", "moe_at_end", "most", "native_router", "processes",
         "reads_token_ids", "shared_embeddings", "shared_experts", "split_tokens",
         "tokens_of_all_ranks", "words", "world"}


def test_refusals_read_settings_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition that reads a name that does not exist would never apply."""
    monkeypatch.setattr(typing, "override", lambda method: method, raising=False)  # Python 3.11
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = extra_args_provider(arguments.add_megatron_arguments(argparse.ArgumentParser()))
    known = {action.dest for action in parser._actions} | {one.name for one in fields(_config())}
    read = {name for name in names_read(refusals) if "." not in name}
    assert read - known - FACTS == set() and FACTS <= read


def test_no_name_is_in_both_tables() -> None:
    assert not FIELDS.keys() & ARGUMENTS.keys()


@pytest.mark.parametrize("name", names(By.REFUSED))
def test_refused_with_value_bound_and_remedy(name: str) -> None:
    row, value = FIELDS[name], 7
    assert row.taken is not None and not row.takes(value)
    with pytest.raises(ValueError) as error:
        translate(_config(**{name: value}), {})
    for part in (f"{name}=7 is not supported", f"must be {row.accepted[-1]!r}", row.words):
        assert part in str(error.value)
    for taken in row.accepted:
        translate(_config(**{name: taken}), {})


@pytest.mark.parametrize(("name", "value"), [
    ("moe_router_force_load_balancing", True), ("moe_router_force_biased", 0.5),
    ("moe_router_topk_limited_devices", 1),
    ("moe_router_load_balancing_type", "seq_aux_loss"),
    ("moe_router_score_function", "sqrtsoftplus"), ("moe_router_dtype", "fp64"),
    ("moe_expert_capacity_factor", 1.0), ("add_bias_linear", True)])
def test_megatrons_router_is_built_for_it(name: str, value: Any) -> None:
    assert FIELDS[name].by is By.ROUTER
    [reason] = translate(_config(**{name: value}), {}).native_router
    assert reason.startswith(f"{name}={value}")


def test_our_router_is_used_for_values_that_it_has_too() -> None:
    for name in names(By.ROUTER):
        for value in FIELDS[name].accepted or (0.25,):
            config = _config(**{name: value})
            if name == "moe_router_load_balancing_type" and value == "none":
                config.moe_aux_loss_coeff = 0.0
            assert translate(config, {}).native_router == (), name


def test_megatrons_batch_invariant_mode_is_ours_too() -> None:
    config = _config(batch_invariant_mode=True)
    assert translate(config, {}).config.batch_invariant
    assert translate(config, {"batch_invariant": True}).config.batch_invariant
    assert translate(_config(), {"batch_invariant": True}).config.batch_invariant
    assert not translate(_config(), {}).config.batch_invariant
    with pytest.raises(ValueError, match="batch_invariant=False contradicts Megatron's own"):
        translate(config, {"batch_invariant": False})


SCORE = """
from moe_plugin.routing import ScoreFunction, score_functions

@score_functions.register("new_score")
class NewScore(ScoreFunction):
    def scores(self, logits_TE):
        return logits_TE.exp()
"""


def test_a_score_function_of_the_users_is_ours(
        own_entries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Megatron's own argument and in a file; a name that neither side knows is refused."""
    monkeypatch.setattr(typing, "override", lambda method: method, raising=False)  # Python 3.11
    arguments = pytest.importorskip("megatron.training.arguments")
    (tmp_path / "my score.py").write_text(SCORE)
    (tmp_path / "moe.yaml").write_text("router: {score: new_score}\n")
    imports = ["--moe-import", str(tmp_path / "my score.py")]
    config = _config(moe_router_score_function="new_score")
    with pytest.raises(ValueError, match="unknown score function 'new_score'; .*sigmoid, softmax"):
        translate(config, {})
    for words in (["--moe-router-score-function", "new_score"],
                  ["--moe-config", str(tmp_path / "moe.yaml")]):
        parser = extra_args_provider(arguments.add_megatron_arguments(
            argparse.ArgumentParser(allow_abbrev=False)))
        args = parser.parse_args([*words, *imports])
        assert args.moe_router_score_function == "new_score"
        plan = translate(config, settings_from_flags(vars(args)))
        assert plan.native_router == () and plan.config.router.score == "new_score"
        assert plan.config.router.normalize == "before_drop"


def test_what_has_no_effect_is_said() -> None:
    [line] = [text for text in translate(_config(
        moe_ncclep_zero_copy=True, moe_hybridep_num_sms_preprocessing=64), {}).notices
        if text.startswith("Megatron settings that choose a native implementation")]
    assert "moe_ncclep_zero_copy=True" in line


def test_what_megatrons_router_reads_has_an_effect() -> None:
    plan = translate(_config(moe_router_num_groups=2, moe_router_group_topk=1,
                             moe_router_fusion=True), {})
    assert plan.native_router and "moe_router_fusion" not in " ".join(plan.notices)


@pytest.mark.parametrize("default", [None, 3, "list"])
def test_a_setting_of_a_newer_megatron_is_refused_unless_it_is_at_its_default(
        default: Any) -> None:
    config = _config()
    new = ("moe_not_yet_known", Any,
           field(default_factory=list) if default == "list" else field(default=default))
    newer = make_dataclass("Newer", [new], bases=(type(config),))
    config.__class__, config.moe_not_yet_known = newer, [] if default == "list" else default
    translate(config, {})
    config.moe_not_yet_known = 8
    with pytest.raises(ValueError, match=r"moe_not_yet_known=8 is unknown to moe-plugin.*Leave it "
                                         r"out \(the default is (None|3|\[\])\)"):
        translate(config, {})


def test_a_default_that_is_made_is_no_setting_without_effect() -> None:
    new = ("moe_grouped_gemm", Any, field(default_factory=lambda: [1]))
    config = make_dataclass("Newer", [new])()
    assert without_effect(config) == []
    config.moe_grouped_gemm = [2]
    assert without_effect(config) == ["moe_grouped_gemm=[2]"]


def test_an_argument_of_a_newer_megatron_is_refused() -> None:
    refuse_unknown_arguments({"num_experts": None, "lr": None}, {"num_experts": 8, "lr": 0.1})
    with pytest.raises(ValueError, match="moe_new_flag=True is unknown .* default is False"):
        refuse_unknown_arguments({"moe_new_flag": False}, {"moe_new_flag": True})


def test_a_version_newer_than_tested_is_said(monkeypatch: pytest.MonkeyPatch,
                                             caplog: pytest.LogCaptureFixture) -> None:
    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.utils.messages import warn_once

    warn_once.cache_clear()
    monkeypatch.setattr(core, "NUMBER", (0, 99))
    with caplog.at_level(logging.WARNING):
        core.check_version()
        core.check_version()
    [record] = [r for r in caplog.records if "is newer than 0.20" in r.getMessage()]
    assert "scripts/test_megatron_versions.sh" in record.getMessage()


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


def test_what_cannot_be_read_or_written_is_named_and_nothing_stays(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.datasets import indexed_dataset

    from moe_plugin.hosts.megatron import data

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "taken.idx").mkdir()
    with pytest.raises(ValueError, match="taken.idx cannot be written.*is a folder"):
        data.write_indexed([b"text"], str(tmp_path / "taken"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe' is a pipe, not a regular file"):
        data.write_indexed(data.documents(str(tmp_path / "pipe")), str(tmp_path / "corpus"))
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(indexed_dataset.IndexedDatasetBuilder, "finalize", full)
    with pytest.raises(ValueError, match="corpus.bin cannot be written.*disk is full"):
        data.write_indexed([b"text"], str(tmp_path / "corpus"))
    assert set(tmp_path.iterdir()) == before
