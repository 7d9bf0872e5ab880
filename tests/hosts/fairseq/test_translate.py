"""Flags to `MoEConfig`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin.config import ExpertsConfig, MoEConfig
from moe_plugin.hosts.fairseq import refusals, translate
from tests.fuzz.hostile import NUMBERS, WORDS, bounded, is_named
from tests.hosts.test_refusals import names_read

pytestmark = pytest.mark.fast


def parse(text: str) -> argparse.Namespace:
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    from moe_plugin.hosts.fairseq.options import MoELanguageModelConfig

    parser = argparse.ArgumentParser(allow_abbrev=False)
    gen_parser_from_dataclass(parser, MoELanguageModelConfig())
    return parser.parse_args(text.split())


def config(text: str, activation: str = "gelu") -> MoEConfig:
    return translate.layer_config(parse(text), model_dim=8, ffn_dim=24, activation=activation)


def value(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = getattr(tree, name)
    return tree


BRANCH = "--moe-freq 2 --moe-expert-count 4 "


@pytest.mark.parametrize(("flags", "path", "expected"), [
    ("", "num_experts", 4),
    ("", "experts.hidden_dim", 24),
    ("", "router.top_k", 2),
    ("", "router.second_expert_policy", "sampling"),
    ("", "router.normalize", "after_drop"),
    ("", "router.normalize_min", 2.0**-23),
    ("--moe-router gshard", "router.normalize_min", 2.0**-23),
    ("--moe-router-normalize-min 0.5", "router.normalize_min", 0.5),
    ("--moe-router-normalize none", "router.normalize_min", 0.0),
    ("--moe-top1-expert", "router.normalize_min", 0.0),
    ("--moe-router sigmoid_bias", "router.normalize_min", 0.0),
    ("", "dispatch.name", "padded"),
    ("", "dispatch.capacity_factor", 1.0),
    ("", "dispatch.eval_token_fraction", 0.25),
    ("", "losses", {"gshard": 1.0}),
    ("--moe-top1-expert", "router.top_k", 1),
    ("--moe-top1-expert", "router.normalize", "none"),
    ("--moe-top1-expert", "router.second_expert_policy", "all"),
    ("--moe-normalize-gate-prob-before-dropping", "router.normalize", "before_drop"),
    ("--moe-batch-prioritized-routing", "router.batch_prioritized", True),
    ("--moe-eval-capacity-token-fraction -1", "dispatch.eval_token_fraction", 0.0),
    ("--moe-second-expert-policy random", "router.second_expert_policy", "random"),
    ("--moe-expert-ffn-dim 99", "experts.hidden_dim", 24),
    ("--moe-expert-hidden-dim 99", "experts.hidden_dim", 99),
    ("--moe-dispatch ragged --moe-capacity-factor none", "dispatch.capacity_factor", None),
    ("--moe-dispatch ragged --moe-capacity-factor none", "dispatch.eval_token_fraction", 0.0),
    ("--moe-dispatch ragged", "dispatch.name", "ragged"),
    ("", "experts.dropout", 0.0),
    ("--activation-dropout 0.1", "experts.dropout", 0.1),
    ("--activation-dropout 0.1 --moe-expert-dropout 0.3", "experts.dropout", 0.3),
    ("--moe-router-fp32", "router.fp32", True),
    ("--moe-gating-use-fp32", "router.fp32", False),
    ("--moe-expert-weights-first", "experts.weights_first", True),
    ("--moe-top-k 3", "router.second_expert_policy", "all"),
    ("--moe-losses gshard=0.5,z=0.001", "losses", {"gshard": 0.5, "z": 0.001}),
])
def test_flags_set_their_path(flags: str, path: str, expected: Any) -> None:
    assert value(config(BRANCH + flags), path) == expected


@pytest.mark.parametrize(("flags", "policy", "normalize"), [
    ("", "sampling", "after_drop"), ("--moe-router cosine", "sampling", "after_drop"),
    ("--moe-router gshard", "all", "after_drop"), ("--moe-router switch", "all", "auto"),
    ("--moe-router sigmoid_bias", "all", "after_drop"),
    ("--moe-router noisy_topk --moe-normalize-gate-prob-before-dropping --moe-router-normalize "
     "none", "all", None),
    ("--moe-router hash,topk --moe-hash-vocabulary 9", "sampling", "after_drop"),
    ("--moe-router switch --moe-second-expert-policy random", None, ""),
    ("--moe-router gshard --moe-second-expert-policy random", "random", "after_drop"),
    ("--moe-router sinkhorn --moe-normalize-gate-prob-before-dropping", None, ""),
    ("--moe-top1-expert --moe-second-expert-policy random", "all", "none"),
    ("--moe-top1-expert --moe-normalize-gate-prob-before-dropping", "all", "none"),
])
def test_the_gate_settings_of_the_branch_go_to_routers_that_read_them(
        flags: str, policy: str | None, normalize: str | None) -> None:
    """Its defaults are for its own gates, whose lines go on working; what was asked for and is not
    read is refused.
    """
    if policy is None or normalize is None:
        with pytest.raises(ValueError, match="does not read it|contradicts"):
            config(BRANCH + flags)
    else:
        found = config(BRANCH + flags).router
        assert (found.second_expert_policy, found.normalize) == (policy, normalize)


def test_a_file_names_the_router_that_reads_or_does_not(tmp_path: Path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text("router: {name: ktop1}\n")
    found = config(f"{BRANCH} --moe-config {path}").router
    assert (found.second_expert_policy, found.normalize) == ("all", "after_drop")
    found = config(f"{BRANCH} --moe-config {path} --moe-router topk").router
    assert found.second_expert_policy == "sampling"


def test_a_file_with_a_number_of_experts_describes_layers(tmp_path: Path) -> None:
    """The branch's defaults of routing, losses and capacity are then none of theirs; its flags add
    to the file, and may not contradict it.
    """
    path = tmp_path / "moe.yaml"
    path.write_text("num_experts: 4\nrouter: {top_k: 2}\nmodel_dim: 8\n")
    found = config(f"--moe-freq 2 --moe-config {path}")
    assert found == MoEConfig(model_dim=8, num_experts=4,
                              experts=ExpertsConfig(hidden_dim=24, activation="gelu"))
    found = config(f"{BRANCH} --moe-config {path} --moe-second-expert-policy random")
    assert found.router.second_expert_policy == "random"
    for flags, words in (
            ("--moe-expert-count 8", r"--moe-expert-count \(num_experts=8\) contradicts "
             "num_experts=4 in .*remove the flag"),
            ("--moe-top1-expert", r"--moe-top1-expert \(router.top_k=1\) contradicts")):
        with pytest.raises(ValueError, match=words):
            config(f"--moe-freq 2 --moe-config {path} {flags}")
    path.write_text("num_experts: 4\nmodel_dim: 16\n")
    with pytest.raises(ValueError, match="model_dim=16 in .*contradicts the width 8.*remove"):
        config(f"--moe-freq 2 --moe-config {path}")


@pytest.mark.parametrize(("fairseq_name", "ours"), [("relu", "relu"), ("gelu", "gelu"),
                                                    ("gelu_accurate", "gelu_tanh"),
                                                    ("relu_squared", "squared_relu")])
def test_activation(fairseq_name: str, ours: str) -> None:
    assert config(BRANCH, activation=fairseq_name).experts.activation == ours


@pytest.mark.parametrize(("flags", "words"), [
    ("--moe-top1-expert --moe-top-k 2", ("--moe-top1-expert", "--moe-top-k")),
    ("--moe-num-experts 8", ("--moe-expert-count", "--moe-num-experts")),
    ("--moe-batch-prioritized-routing --moe-batch-prioritized false", ("--moe-batch-prioritized",)),
    ("--moe-normalize-gate-prob-before-dropping --moe-router-normalize none",
     ("--moe-router-normalize",)),
    ("--moe-top-k 9", ("top_k", "num_experts=4")),
    ("--moe-capacity-factor many", ("--moe-capacity-factor", "many")),
    ("--moe-config /no/such.yaml", ("/no/such.yaml",)),
])
def test_contradictions_and_bad_values_are_refused(flags: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        config(BRANCH + flags)
    for word in words:
        assert word in str(caught.value)


def test_activation_without_counterpart_is_refused() -> None:
    with pytest.raises(ValueError, match="tanh"):
        config(BRANCH, activation="tanh")


def test_yaml_lies_above_fairseq_and_below_flags(tmp_path: Path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text(
        "num_experts: 16\nrouter: {top_k: 3, normalize: before_drop}\nexperts: {hidden_dim: 40}\n")
    seen = config(f"--moe-freq 2 --moe-config {path} --moe-router-normalize none")
    assert (seen.num_experts, seen.router.top_k, seen.experts.hidden_dim) == (16, 3, 40)
    assert seen.router.normalize == "none"
    assert seen.dispatch.name == "ragged"
    assert seen.dispatch.capacity_factor is None


def test_experts_must_be_counted() -> None:
    with pytest.raises(ValueError, match="--moe-expert-count"):
        translate.check_experts_given(parse("--moe-freq 2"), 2)
    with pytest.raises(ValueError, match="--moe-freq -1"):
        translate.check_experts_given(parse("--moe-freq -1 --moe-expert-count 2"), -1)


@pytest.mark.parametrize(("rule", "factor"), [("world_size", 0.25), ("sqrt_world_size", 0.5)])
def test_gradient_factor(rule: str, factor: float) -> None:
    assert translate.gradient_factor(parse(f"--moe-normalize-expert-grad {rule}"), 4) == factor


def test_padding_is_masked_on_request_and_when_dropless() -> None:
    for flags, masked in (("", False), ("--use-moe-pad-mask", True),
                          ("--moe-capacity-factor none", True), ("--moe-capacity-factor 1.25",
                                                                 False)):
        args = parse(BRANCH + flags)
        assert translate.masks_padding(args, config(BRANCH + flags)) is masked


def test_modules_in_a_file_need_trust(tmp_path: Path) -> None:
    (tmp_path / "moe.yaml").write_text("imports: json\n")
    flags = f"{BRANCH} --moe-config {tmp_path / 'moe.yaml'}"
    with pytest.raises(ValueError, match="imports='json'.*--moe-trust-imports"):
        config(flags)
    for trust in ("--moe-trust-imports", "--moe-trust-imports true"):
        assert config(f"{flags} {trust}").imports == "json"
    assert config(f"{BRANCH} --moe-import json").imports == "json"


@given(st.dictionaries(st.sampled_from([*translate.BRANCH_PATHS, "moe_losses", "moe_top_k",
                                        "moe_capacity_factor", "moe_num_experts", "moe_topology",
                                        "moe_expert_hidden_dim", "moe_config"]),
                       st.one_of(NUMBERS, WORDS), max_size=4))
@bounded(200)
def test_flags_of_any_value_end_in_settings_or_a_named_error(values: dict[str, Any]) -> None:
    typed = {name: value for name, value in values.items() if name not in translate.BRANCH_PATHS
             or type(value) is type(translate.BRANCH_PATHS[name][0])}
    args = argparse.Namespace(**{"moe_expert_count": 4, **{
        name: value if name in translate.BRANCH_PATHS else str(value)
        for name, value in typed.items()}})
    try:
        made = translate.layer_config(args, model_dim=8, ffn_dim=24, activation="gelu")
        assert isinstance(made, MoEConfig)
    except ValueError as error:
        assert is_named(error), error



def test_refusals_read_settings_that_exist() -> None:
    """A condition that reads a name that does not exist would never apply."""
    from moe_plugin.hosts.fairseq.compat.names import FairseqConfig
    from moe_plugin.hosts.fairseq.options import KINDS

    groups = {name: set(field.default_factory.__dataclass_fields__)
              for name, field in FairseqConfig.__dataclass_fields__.items()
              if hasattr(field.default_factory, "__dataclass_fields__")}
    known = {f"{group}.{name}" for group, names in groups.items() for name in names}
    known |= {f"model.{name}" for kind in KINDS for name in kind.__dataclass_fields__}
    read = names_read(refusals)
    assert {name for name in read if name.partition(".")[0] in {*groups, "model"}} - known == set()
    facts = {name for name in read if "." not in name and f"model.{name}" not in known}
    assert facts == {"bounded", "dense", "encoder_layerdrop", "losses", "other_model",
                     "other_router", "own_step", "sharding", "sizes", "trained_criterion",
                     "training", "trains_criterion"}
