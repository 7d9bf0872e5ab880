"""Settings of any form: a config or a named error, whatever the text, the tree or the flags are."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from moe_plugin import MoEBlock, MoELayer, replace_ffn
from moe_plugin.comm import Topology, TorchComm
from moe_plugin.config import (
    MoEConfig,
    RunConfig,
    flatten,
    from_dict,
    from_yaml,
    run_from_dict,
    to_dict,
    with_overrides,
)
from moe_plugin.config.declared import built_in, fixed_k_of, readers_of
from moe_plugin.config.flags import config_from_flags, flag_specs, run_from_flags, setting_specs
from moe_plugin.config.router import RouterConfig
from moe_plugin.kernels import score_functions
from moe_plugin.records import TokenInfo
from moe_plugin.tuning.prepare_group import read_topology
from tests.distributed import run_gloo
from tests.fuzz.hostile import VALUES, WORDS, bounded, is_named

RUN_PATHS = sorted(flatten(to_dict(RunConfig())))
PATHS = sorted(flatten(to_dict(MoEConfig()))) + RUN_PATHS
FLAGS = sorted(spec.dest for spec in flag_specs() if spec.dest != "moe_config")
PIECES = [
    "model_dim", "router", "top_k", "losses", "imports", ": ", ":", "\n", "  ", "- ", "[", "]", "{",
    "}", ", ", "&a ", "*a", "!!int ", "!!timestamp ", "!!binary ", "!!python/name:os ", "<<: ",
    "? ", "|", ">", "'", '"', "${", "}", "# ", "---\n", "...", "%YAML 9\n", "8", "1e9", "9" * 5000,
    ".inf", "null", "\t", "\x07", "é", "😀", "0x", "2020-13-99", "~"]


def tree(leaves: dict[str, Any]) -> dict[str, Any]:
    """Dotted paths as nested values; a path through a leaf replaces it."""
    found: dict[str, Any] = {}
    for path, value in leaves.items():
        *above, name = path.split(".")
        place = found
        for part in above:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[name] = value
    return found


@given(st.one_of(st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
                 st.text(max_size=40)))
@bounded(400)
def test_text_of_a_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "moe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert isinstance(from_yaml(str(path)), MoEConfig)
    except ValueError as error:
        assert is_named(error), error


@given(st.dictionaries(st.one_of(st.sampled_from(PATHS), WORDS), VALUES, max_size=4))
@example({"losses": {"1" * 1000: "x"}})
@bounded(400)
def test_trees(leaves: dict[str, Any]) -> None:
    in_code = {path: value for path, value in leaves.items() if path in PATHS and "." not in path}
    for build in (lambda: from_dict(tree(leaves)), lambda: MoEConfig(**in_code),
                  lambda: with_overrides(MoEConfig(), leaves), lambda: run_from_dict(tree(leaves)),
                  lambda: with_overrides(RunConfig(), leaves)):
        try:
            assert isinstance(build(), MoEConfig | RunConfig)
        except ValueError as error:
            assert is_named(error), error


ROUTER_VALUES: dict[str, list[Any]] = {
    "top_k": [1, 2, 3, 4], "normalize": ["auto", "none", "before_drop", "after_drop"],
    "second_expert_policy": ["all", "sampling", "random"], "score": score_functions.names(),
    "noise": [0.0, 1.0], "input_jitter": [0.0, 0.5], "batch_prioritized": [False, True],
    "groups": [0, 2], "group_top_k": [1, 2], "group_scores": [0, 1], "bias_rate": [0.001, 0.1],
    "cosine_dim": [256, 8], "sinkhorn_rounds": [20, 3], "fp32": [False, True],
}


@given(st.lists(st.sampled_from(sorted(built_in())), min_size=1, max_size=2, unique=True),
       st.fixed_dictionaries({}, optional={
           name: st.sampled_from(values) for name, values in ROUTER_VALUES.items()}),
       st.integers(1, 5), st.booleans())
@bounded(300)
def test_settings_of_routers(names: list[str], given_: dict[str, Any], tokens: int,
                             training: bool) -> None:
    """A setting that is taken is read by one of the routers, and the layer computes."""
    more = {"hash": {"vocabulary": 9}} if "hash" in names else {}
    try:
        layer = MoELayer(8, num_experts=4, experts={"hidden_dim": 8},
                         dispatch={"capacity_factor": 0.5},
                         router={"name": ",".join(names), **given_, **more}).train(training)
        out = layer(torch.randn(tokens, 8), info=TokenInfo(torch.arange(tokens)))
    except ValueError as error:
        assert is_named(error), error
    else:
        assert out.output.isfinite().all()
        config = layer.config.router
        for name, value in given_.items():
            assert value == getattr(RouterConfig(), name) or set(names) & set(
                readers_of(name, value)), (names, name, value)
            assert name != "top_k" or value == 2 or set(names) - {"dense_to_sparse"} and value in {
                fixed_k_of(each) or value for each in names}
        assert config.top_k > 1 or config.normalize in ("auto", "none")


@given(st.dictionaries(st.sampled_from(FLAGS), st.one_of(WORDS, VALUES.map(str)), max_size=4))
@bounded(300)
def test_flags(values: dict[str, str]) -> None:
    for build, tree_ in (config_from_flags, MoEConfig), (run_from_flags, RunConfig):
        try:
            assert isinstance(build(values), tree_)
        except ValueError as error:
            assert is_named(error), error


@given(st.one_of(WORDS, st.integers(0, 9).map(str), st.dictionaries(
    st.sampled_from(["nodes", "node"]), st.one_of(
        VALUES, st.lists(st.lists(st.integers(-1, 4), max_size=3), max_size=3))).map(json.dumps)),
    st.integers(1, 5))
@bounded(300)
def test_topologies(tmp_path: Path, text: str, size: int) -> None:
    if text.startswith("{"):
        path = tmp_path / "nodes.yaml"
        path.write_text(text)
        text = str(path)
    try:
        topology = read_topology(text, size)
    except ValueError as error:
        assert is_named(error), error
    else:
        assert isinstance(topology, Topology) and len(topology.node_of) == topology.size


CHANGES: list[dict[str, Any]] = [
    {}, {"num_experts": 8}, {"model_dim": 16}, {"router": {"top_k": 1}}, {"comm": {"wire": "bf16"}},
    {"router": {"name": "switch"}}, {"router": {"name": "base"}}, {"losses": {"z": 1.0}},
    {"dispatch": {"name": "padded", "capacity_factor": 1.0}}, {"dispatch": {"name": "all_gather"}},
    {"comm": {"all_to_all": "leader"}}, {"experts": {"kind": "gated_ffn"}}, {"parallel": {"r": 0}},
    {"parallel": {"d": 2}}, {"parallel": "auto"}, {"experts": {"hidden_dim": 40}},
    {"parallel": {"shards": 2}}, {"parallel": {"guests": 1}}, {"deterministic": True},
]


RUN_FLAGS = sorted(spec.dest.removeprefix("moe_") for spec in setting_specs()
                   if spec.path in RUN_PATHS)
BUILDS: list[Callable[..., object]] = [
    lambda **given: MoELayer(8, num_experts=2, **given),
    lambda **given: MoEBlock(8, num_experts=2, **given),
    lambda **given: replace_ffn(nn.Sequential(nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))), num_experts=2, **given)]


@given(st.dictionaries(st.sampled_from(RUN_FLAGS),
                       st.one_of(VALUES, st.sampled_from(["run.jsonl", "swap", "host", 2, 0.5])),
                       min_size=1, max_size=3), st.sampled_from(BUILDS))
@bounded(150)
def test_settings_that_only_a_run_reads(given: dict[str, Any],
                                        build: Callable[..., object]) -> None:
    """A layer takes none of them, whatever their values."""
    with pytest.raises(ValueError, match="a run and has no effect on a layer") as found:
        build(**given)
    assert is_named(found.value)
    said = str(found.value)  # a section may hold a name that is not a setting
    assert any(path in said for path in RUN_PATHS) or said.startswith(
        tuple(f"{name}." for name, value in given.items() if isinstance(value, dict)))


def _pairs() -> list[tuple[int, int, str]]:
    """(settings of rank 0, of rank 1, what this rank said) of many layers, one after the other."""
    comm, draw = TorchComm(), random.Random(5)
    found = []
    for _ in range(60):
        first = draw.randrange(len(CHANGES))
        pair = first, draw.choice([first, draw.randrange(len(CHANGES))])
        config = {"model_dim": 8, "num_experts": 4, **CHANGES[pair[comm.rank]]}
        try:
            layer = MoELayer(from_dict(config), comm)
            layer(torch.randn(3 + comm.rank, config["model_dim"])).output.sum().backward()
            found.append((*pair, ""))
        except ValueError as error:
            found.append((*pair, str(error)))
    return found


@pytest.mark.distributed
def test_ranks_with_different_settings_end_alike() -> None:
    first, second = run_gloo(2, _pairs)
    assert first == second
    for one, other, said in first:
        assert ("settings differ between the 2 ranks" in said) == (one != other), (one, other, said)
        assert one == other or is_named(ValueError(said))
    assert any(one == other for one, other, _ in first)
