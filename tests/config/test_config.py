"""The config tree and its flags: round trips, and a clear error for everything that is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import omegaconf
import pytest
from omegaconf import OmegaConf

from moe_plugin import MoELayer
from moe_plugin.config import (
    DispatchConfig,
    ExpertsConfig,
    MoEConfig,
    ObserveConfig,
    RouterConfig,
    RunConfig,
    both_from_yaml,
    flatten,
    from_dict,
    from_yaml,
    run_config,
    run_from_dict,
    settings_from_yaml,
    to_dict,
    with_overrides,
)
from moe_plugin.config.flags import (
    add_arguments,
    as_given,
    config_from_flags,
    parse_value,
    run_from_flags,
    setting_specs,
)
from moe_plugin.config.options import hints_of, is_section, unread_allowed
from moe_plugin.planner.forest.source import find_network

pytestmark = pytest.mark.fast


def test_round_trip() -> None:
    config = from_dict({
        "model_dim": 64, "router": {"top_k": 1}, "dispatch": {"capacity_factor": 1},
        "losses": {"z": 0.001}
    })
    assert from_dict(to_dict(config)) == config
    assert config.dispatch.capacity_factor == 1.0 and config.losses == {
        "z": 0.001
    } and config.hidden_dim == 256


# of a layer; of a run; text of a file
WRONG_LAYER = [
    ({"routr": {}}, ["'routr'", "router"]),
    ({"router": {"topk": 2}}, ["'router.topk'", "top_k"]),
    ({"router": {"top_k": 0}}, ["router.top_k=0", ">= 1", "use"]),
    ({"router": {"top_k": "two"}}, ["router.top_k='two'", "int"]),
    ({"router": {"top_k": True}}, ["router.top_k=True", "int"]),
    ({"router": {"top_k": 9}}, ["router.top_k=9", "num_experts=8", "lower"]),
    ({"router": {"score": ""}}, ["router.score=''", "registered name", "softmax"]),
    ({"router": {"noise": -1}}, ["router.noise=-1.0", ">= 0"]),
    ({"router": {"input_jitter": 1.0}}, ["router.input_jitter=1.0", "[0, 1)"]),
    ({"router": {"second_expert_policy": "random", "top_k": 3}},
     ["second_expert_policy='random'", "router.top_k is 3"]),
    ({"router": "topk"}, ["router='topk'", "mapping"]),
    ({"losses": {"load_importance": 0.1}}, ["losses.load_importance=0.1", "router.noise"]),
    ({"losses": {"tutel_load_importance": 0.1}},
     ["losses.tutel_load_importance=0.1", "router.noise"]),
    ({"losses": {"z": -0.1}}, ["losses.z=-0.1", ">= 0"]),
    ({"losses": 3}, ["losses=3", "mapping"]),
    ({"dispatch": {"capacity_factor": float("nan")}}, ["dispatch.capacity_factor=nan", "finite"]),
    ({"dispatch": {"eval_token_fraction": 2}}, ["eval_token_fraction=2.0", "[0, 1]"]),
    ({"num_experts": 0}, ["num_experts=0", ">= 1"]),
    ({"comm": {"timeout_s": 0}}, ["comm.timeout_s=0.0", "> 0"]),
    ({"experts": {"hidden_dim": -4}}, ["experts.hidden_dim=-4", ">= 0"]),
    ({"experts": {"activation": "tanh"}}, ["experts.activation='tanh'", "gelu"]),
    ({"parallel": "both"}, ["parallel.mode='both'"]), ({"parallel": {"d": 0}}, ["parallel.d=0"]),
    ({"parallel": 3}, ["must be a mapping"]), ({"tuner": {"bucket": 1}}, ["tuner.bucket=1"]),
]
WRONG_RUN = [
    ({"offload": {"profile": "file"}}, ["offload.profile='file'", "offload.activations=auto"]),
    ({"observe": {"interval": 0}}, ["observe.interval=0", ">= 1"]),
    ({"offload": {"activations": "keep,auto"}},
     ["offload.activations='keep,auto'", "one of keep, recompute, swap", "recompute,keep"]),
]
WRONG_FILE = [
    ("a: [1, 2", ["is not YAML"]),
    ("- 1\n- 2", ["contains a list"]),
    ("\x00\x01", ["is not YAML"]),
    ("num_expert: 3", ["num_expert", "known"]),
    ("1: 2\nfoo: 3", ["unknown key '1'"]),
    ("router: {top_k: 1}\nrouter: {noise: 1.0}", ["is not YAML", "duplicate key router"]),
    ("losses: {z: 1e-3, z: 1.0}", ["duplicate key z"]),
    ("router:", ["router=None", "mapping"]),
    ("3", ["cannot be read", "int"]),
    ("imports: ${oc.env:HOME}", ["interpolation"]),
    ("imports: '${'", ["bad.yaml"]),
    ("num_experts: '8'", ["num_experts='8'", "int"]),
    ("router: {noise: .inf}", ["router.noise=inf", "finite"]),
]


def of_file(path: Path, text: str) -> MoEConfig:
    path.write_text(text)
    return from_yaml(str(path))


@pytest.mark.parametrize("kind,given,words", [
    *(("layer", tree, words) for tree, words in WRONG_LAYER),
    *(("run", tree, words) for tree, words in WRONG_RUN),
    *(("file", text, words) for text, words in WRONG_FILE)])
def test_wrong_values_are_named(tmp_path: Path, kind: str, given: Any, words: list[str]) -> None:
    read = {"layer": from_dict, "run": run_from_dict,
            "file": functools.partial(of_file, tmp_path / "bad.yaml")}[kind]
    with pytest.raises(ValueError) as error:
        read(given)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("tree,near", [
    ({"router": {"top_q": 2}}, "did you mean router.top_k? If not, known keys here: "),
    ({"num_expert": 3}, "did you mean num_experts?"), ({"top_k": 2}, "did you mean router.top_k?"),
    ({"name": "x"}, "did you mean router.name or dispatch.name?"),
    ({"parallel": {"xyz": 1}}, "unknown key 'parallel.xyz'; known keys here: ")])
def test_what_a_wrong_key_is_near_to(tree: dict, near: str) -> None:
    with pytest.raises(ValueError, match=re.escape(near)):
        from_dict(tree)


def test_numbers_without_a_point(tmp_path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text(
        "losses: {z: 1e-3, gshard: 2E+0}\nrouter: {noise: 1e0}\nobserve: {jsonl: 1e-3.jsonl}\n")
    config, run = both_from_yaml(str(path))
    assert config.losses == {"z": 0.001, "gshard": 2.0} and config.router.noise == 1.0
    assert run.observe.jsonl == "1e-3.jsonl"


@pytest.mark.parametrize("section,settings,words", [
    (RouterConfig, {"top_k": "2"}, "router.top_k='2' is a str; must be int"),
    (RouterConfig, {"top_k": 2.5}, "router.top_k=2.5 is a float; must be int"),
    (RouterConfig, {"hash": "random"}, "router.hash='random' is a str; must be HashConfig"),
    (ExpertsConfig, {"bias": 1}, "experts.bias=1 is a int"),
    (DispatchConfig, {"equal_tokens": "yes"}, "dispatch.equal_tokens='yes'"),
    (ObserveConfig, {"interval": None}, "observe.interval=None"),
    (MoEConfig, {"num_experts": "8"}, "num_experts='8' is a str; must be int"),
    (MoEConfig, {"router": {"top_k": 2}}, "router={'top_k': 2} is a dict; must be RouterConfig"),
    (MoEConfig, {"losses": {"z": None}}, "losses.z=None"),
])
def test_wrong_types_in_code(section: type, settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        section(**settings)


def test_installed_examples_are_found_by_name_from_anywhere(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "configs/moe/switch.yaml"
    assert from_yaml(name, model_dim=8).num_experts == 32
    assert find_network("configs/networks/thin_link.yaml")
    (tmp_path / "configs" / "moe").mkdir(parents=True)
    (tmp_path / name).write_text("num_experts: 4", encoding="utf-8")
    assert from_yaml(name).num_experts == 4, "a file that is there is meant"
    for other in ("configs/moe/no.yaml", "configs/../configs/moe/gshard.yaml"):
        with pytest.raises(ValueError, match="configs"):
            from_yaml(other)


def test_missing_file() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        from_yaml("/nowhere/moe.yaml")


def test_flags_override_file_and_host(tmp_path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text("router: {top_k: 4, noise: 0.5}\nnum_experts: 16\n")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([
        "--moe-config",
        str(path), "--moe-top-k", "1", "--moe-losses", "gshard=0.1,z=1e-3", "--moe-capacity-factor",
        "1.25", "--moe-batch-prioritized", "--moe-expert-bias", "false"
    ])
    config = config_from_flags(vars(args), {"model_dim": 32, "router.noise": 0.25})
    assert (config.router.top_k, config.num_experts, config.model_dim,
            config.router.noise) == (1, 16, 32, 0.25)
    assert config.losses == {"gshard": 0.1, "z": 1e-3} and config.dispatch.capacity_factor == 1.25
    assert config.router.batch_prioritized and not config.experts.bias


_CAPACITIES = ("dispatch: {name: padded, capacity_factor: 1.25, eval_capacity_factor: 2.0, "
               "eval_token_fraction: 0.5}\nnum_experts: 4\n")


@pytest.mark.parametrize(("flags", "left"), [
    ({}, {}),
    ({"moe_eval_capacity_factor": "3"}, {"eval_capacity_factor": 3.0}),
    ({"moe_dispatch": "padded"}, {"name": "padded"}),
    ({"moe_eval_token_fraction": "0.1"}, {"eval_token_fraction": 0.1})])
def test_no_capacity_as_a_flag_drops_nothing_whatever_the_file_says(
        tmp_path, flags: dict[str, str], left: dict[str, object],
        caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"{len(left)}{'_'.join(left)}.yaml"
    path.write_text(_CAPACITIES)
    given = {"moe_config": str(path), **flags}
    assert config_from_flags(given).dispatch.capacity_factor == 1.25
    with caplog.at_level("INFO", "moe_plugin"):
        config = config_from_flags({**given, "moe_capacity_factor": "none"})
        config_from_flags({**given, "moe_capacity_factor": "none"})
    assert config == from_dict({"num_experts": 4, "dispatch": left})
    [said] = caplog.messages  # once, though hosts read the flags several times
    assert said.startswith(f"left out of '{path}', because the flags make it ineffective: ")
    assert ("dispatch.name='padded'" in said) is ("name" not in left)


def test_an_error_says_where_each_setting_in_it_was_given(tmp_path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text("num_experts: 4\nlosses: {z: 0.1}\n")
    given = {"moe_config": str(path), "moe_top_k": "5"}
    with pytest.raises(ValueError) as error:
        config_from_flags(given)
    said = as_given(str(error.value), given)
    assert said == f"{error.value} (num_experts: in '{path}'; router.top_k: --moe-top-k '5')"
    assert as_given("losses.z=-1 is", given) == f"losses.z=-1 is (losses: in '{path}')"
    assert as_given("losses of sight", given) == "losses of sight"
    own = {"num_experts": "--num-experts"}
    assert as_given("num_experts=4 is", {}, own) == "num_experts=4 is (num_experts: --num-experts)"


def test_an_error_in_a_file_names_the_file(tmp_path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text("router: {top_kk: 5}\n")
    for read in (from_yaml, settings_from_yaml, lambda p: config_from_flags({"moe_config": p})):
        with pytest.raises(ValueError, match="^config file '.*moe.yaml': unknown key 'router.top_"):
            read(str(path))


def test_every_flag_reads_back_its_default() -> None:
    specs = setting_specs()
    defaults = flatten({**to_dict(MoEConfig()), **to_dict(RunConfig())})
    leaves = {spec.path for spec in specs} - {"parallel.overlap_degree", "parallel.routing_degree"}
    assert len({spec.flag for spec in specs}) == len(specs) and leaves == set(defaults) - {
        "model_dim"
    }
    given = {
        spec.dest: ",".join(f"{k}={v}" for k, v in defaults[spec.path].items()) or "none"
        if spec.kind is dict else str(defaults[spec.path])
        for spec in specs if spec.path in leaves
    }
    assert config_from_flags(given) == MoEConfig()


def test_none_for_evaluation_alone_is_refused(tmp_path) -> None:
    """It reads as "no token is dropped", but is the training capacity of a file or preset."""
    path = tmp_path / "moe.yaml"
    path.write_text("dispatch: {capacity_factor: 1.25}\n")
    with pytest.raises(ValueError, match="none is ambiguous.*use 0 to drop no tokens"):
        config_from_flags({"moe_config": str(path), "moe_eval_capacity_factor": "none"})
    flags = {"moe_capacity_factor": "none", "moe_eval_capacity_factor": "none"}
    assert config_from_flags({"moe_config": str(path), **flags}).dispatch.capacity_factor is None


def test_second_names(tmp_path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text("parallel: {overlap_degree: 2, routing_degree: 0}\n")
    assert settings_from_yaml(str(path)) == {"parallel.d": 2, "parallel.r": 0}
    for config in (from_yaml(str(path)),
                   with_overrides(MoEConfig(), {"parallel.overlap_degree": 2, "parallel.r": 0}),
                   config_from_flags({"moe_overlap_degree": "2", "moe_routing_degree": "0"})):
        assert (config.parallel.d, config.parallel.r) == (2, 0)
    # a flag overrides the file, whichever name either uses
    flags = {"moe_config": str(path), "moe_overlap": "4", "moe_routing_degree": "none"}
    config = config_from_flags(flags).parallel
    assert (config.d, config.r) == (4, None)


@pytest.mark.parametrize(
    "call", [lambda: from_dict({"parallel": {"d": 2, "overlap_degree": 4}}),
             lambda: with_overrides(MoEConfig(), {"parallel.d": 2, "parallel.overlap_degree": 4}),
             lambda: config_from_flags({"moe_overlap": "2", "moe_overlap_degree": "4"})],
    ids=["file", "code", "flags"])
def test_a_setting_under_both_names(call) -> None:
    words = "parallel.overlap_degree=4 and parallel.d=2 set the same"
    with pytest.raises(ValueError, match=words):
        call()


def test_the_error_of_a_flag_says_whether_none_is_a_value() -> None:
    specs = {spec.path: spec for spec in setting_specs()}
    for path, words in (("dispatch.capacity_factor", "must be float or none$"),
                        ("num_experts", "must be int$"), ("losses", "each once$")):
        with pytest.raises(ValueError, match=words):
            parse_value(specs[path], "no")


@pytest.mark.parametrize("flag,text", [("moe_top_k", "x"), ("moe_losses", "z"),
                                       ("moe_expert_bias", "maybe"),
                                       ("moe_capacity_factor", "1,0")])
def test_unreadable_flags(flag: str, text: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        config_from_flags({flag: text})


def test_overrides() -> None:
    assert with_overrides(MoEConfig(), {"router.top_k": 1}).router.top_k == 1
    both = with_overrides(MoEConfig(),
                          {"parallel.guests": 3, "parallel": "auto", "parallel.d": 2}).parallel
    assert (both.mode, both.d, both.guests) == ("auto", 2, 3)
    with pytest.raises(ValueError, match="unknown key 'router.k'"):
        with_overrides(MoEConfig(), {"router.k": 1})


def test_overrides_need_nothing_of_omegaconf_that_fairseqs_branch_lacks(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `moe` branch pins hydra < 1.1, and with it omegaconf 2.0.6."""

    def update(cfg, key, value=None, merge=None):  # as in 2.0.6
        raise AssertionError("not needed")

    monkeypatch.setattr(omegaconf.OmegaConf, "update", staticmethod(update))
    changed = with_overrides(MoEConfig(), {"router.top_k": 1, "losses.z": 0.1, "comm.wire": "bf16"})
    assert (changed.router.top_k, changed.comm.wire) == (1, "bf16")
    assert changed.losses == {"gshard": 0.01, "z": 0.1}
    with pytest.raises(ValueError, match="unknown key.*num_experts.x"):
        with_overrides(MoEConfig(), {"num_experts.x": 1})


def test_a_section_that_is_no_mapping_is_told_its_settings_alone() -> None:
    with pytest.raises(ValueError, match="experts=3 must be a mapping with keys kind, hidden_dim"):
        from_dict({"model_dim": 8, "experts": 3})


@pytest.mark.parametrize(("given", "words"), [
    ({"comm": 8}, "comm=8 is a int; must be a Comm"),
    ({"router": int}, "router=<class 'int'> is a type; must be a name, a dict"),
    ({"experts": [None]}, "must be a dict of settings or a function"),
])
def test_arguments_of_a_layer_are_not_left_out_silently(given: dict[str, object],
                                                        words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MoELayer(8, **given)


@pytest.mark.parametrize(("text", "said"), [
    ("200=4,100=2", "must be steps in ascending order"), ("1=2", "must be steps from 2 to"),
    ("5=0", "must be 1 to .* ranks; use a divisor"), ("5", "cannot be read; must be step=ranks"),
    ("5=2,5=4", "must be step=ranks,step=ranks, each once"), ("5=2.5", "cannot be read")])
def test_sizes_by_step_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_from_flags({"moe_expert_parallel_at": text})


@pytest.mark.parametrize(("name", "value"), [
    ("guard.votes", 3), ("guard.twins", 5), ("offload.weights", "host"),
    ("pipeline.schedule", "eager-1f1b")])
def test_sizes_by_step_beside_groups_that_stay(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}='?{value}'? is out of bounds: must be .* "
                       "together with resize.expert_parallel_at; .* leave one of the two out"):
        run_config({name: value, "resize.expert_parallel_at": {5: 2}})


def test_sizes_by_step_of_a_file_and_of_a_flag(tmp_path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text("resize: {expert_parallel_at: {100: 4, 200: 2}}\n")
    resize = run_config(settings_from_yaml(str(path))).resize
    assert resize == run_from_flags({"moe_expert_parallel_at": "100=4,200=2"}).resize
    assert [resize.size_at(step, 1) for step in (1, 99, 100, 199, 200)] == [1, 1, 4, 4, 2]
    with pytest.raises(ValueError, match="expert_parallel_at: the key='x' is a str; must be int"):
        run_from_dict({"resize": {"expert_parallel_at": {"x": 2}}})


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Path, type and declaration of every setting."""
    for field in dataclasses.fields(cls):
        hint = hints_of(cls)[field.name]
        if is_section(hint):
            yield from leaves(hint, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hint, field


def documented(hint: Any, field: dataclasses.Field) -> set[str]:
    """The values of a setting that its declaration and its help name, as a user writes them."""
    kinds, choices = typing.get_args(hint) or (hint,), set(field.metadata.get("choices", ()))
    in_help = set(re.findall(r"(?:^|; |\. )(\w+):", field.metadata.get("help", "")))
    if kinds[0] is not str:
        in_help = {value for value in in_help if value.isdigit()}
    empty = {"none"} if type(None) in kinds or typing.get_origin(hint) is dict else set()
    return (choices or in_help - {"none"}) | empty


SETTINGS = [(tree, path, value) for tree in (MoEConfig, RunConfig)
            for path, hint, field in leaves(tree) for value in sorted(documented(hint, field))]


@pytest.mark.parametrize(("tree", "path", "value"), SETTINGS, ids=lambda given: str(given))
def test_documented_values_by_every_way_in(tmp_path, tree: type, path: str, value: str) -> None:
    """A file, Hydra's override and a flag give the same setting, of the declared type."""
    file = tmp_path / "moe.yaml"
    file.write_text(yaml_of(path, value))
    found = []
    hydra = OmegaConf.to_container(OmegaConf.from_dotlist([f"{path}={value}"]))
    spec = next((spec for spec in setting_specs() if spec.path == path), None)
    given = [lambda: settings_from_yaml(str(file)), lambda: hydra]
    if spec is not None:
        given.append(lambda: {path: parse_value(spec, value)})
    for way in given:
        try:
            with unread_allowed():
                made = with_overrides(tree(), way())
            found.append(operator.attrgetter(path)(made))
        except ValueError as error:
            assert " is a " not in str(error) and "must be one of" not in str(error), error
            found.append("does not stand alone")
    assert all(one == found[0] and type(one) is type(found[0]) for one in found), found
    assert value == "none" or str(found[0]) in ("does not stand alone", value, f"{value}.0")


def yaml_of(path: str, value: str) -> str:
    """A file with this one setting."""
    *above, name = path.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(above)]
    return "\n".join([*lines, f"{'  ' * len(above)}{name}: {value}"]) + "\n"


def test_numbers_where_a_text_is_documented(tmp_path) -> None:
    """A topology of 4 ranks a node, a cache of 0 bytes."""
    assert from_dict({"comm": {"topology": 4}}).comm.topology == "4"
    assert ExpertsConfig(store="host", cache=0).cache == "0"
    file = tmp_path / "moe.yaml"
    file.write_text("comm: {topology: 4}\nexperts: {store: host, cache: 0}\nlosses: none\n")
    assert settings_from_yaml(str(file)) == {
        "comm.topology": "4", "experts.store": "host", "experts.cache": "0", "losses": {}}
    with pytest.raises(ValueError, match="comm.topology=True is a bool; must be str"):
        from_dict({"comm": {"topology": True}})
