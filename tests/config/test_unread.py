"""No setting is ignored without a word: what nothing reads is refused, or warned of."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_plugin import MoEBlock, MoELayer, replace_ffn
from moe_plugin.comm import LocalComm
from moe_plugin.config import (
    MoEConfig,
    RunConfig,
    both_from_yaml,
    flatten,
    from_dict,
    from_yaml,
    run_from_dict,
    to_dict,
)
from moe_plugin.config.declared import built_in
from moe_plugin.config.experts import MULTIPLY_BY_TORCH, ROUNDED
from moe_plugin.config.flags import config_from_flags, file_settings, run_from_flags
from moe_plugin.config.named import named_config
from moe_plugin.config.router import router_names
from moe_plugin.config.run import reader_of
from moe_plugin.config.tree import of_layer, of_run
from moe_plugin.kernels import strategies
from moe_plugin.records import TokenInfo
from moe_plugin.routing import only_read, routers
from tests.routing.references import NEEDED

pytestmark = pytest.mark.fast

Build = Callable[..., Any]


def ffn() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))


def layer(**settings: Any) -> MoELayer:
    return MoELayer(16, **settings)


def block(**settings: Any) -> MoEBlock:
    return MoEBlock(16, **settings)


def replaced(**settings: Any) -> list[str]:
    return replace_ffn(ffn(), **settings)


@pytest.mark.parametrize("build", [layer, block, replaced, named_config])
@pytest.mark.parametrize("settings, words", [
    ({"votes": 3}, "guard.votes=3 is a setting of a run.*plain.run.TrainingSteps"),
    ({"guard": {"twins": 5}}, "guard.twins=5 .*TrainingSteps"),
    ({"activations": "swap"}, "offload.activations='swap' .*TrainingSteps"),
    ({"stats_jsonl": "stats.jsonl"}, "observe.jsonl='stats.jsonl' .*TrainingSteps"),
    ({"weights_on": "host"}, "offload.weights='host' .*streamed_trainer"),
    ({"pipeline": "terapipe"}, "pipeline='terapipe' .* a layer: leave it out, or use Meg"),
    ({"stats_interval": 100}, "observe.interval=100 .*TrainingSteps"),  # the default, too
])
def test_a_layer_refuses_settings_of_a_run(build: Build, settings: dict[str, Any],
                                           words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(*([16] if build is named_config else []), **settings)


def test_each_tree_takes_its_own_settings_alone(tmp_path: Path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text("router: {top_k: 1}\nguard: {votes: 3}\npipeline: terapipe\n")
    layer_of, run = both_from_yaml(str(path), model_dim=16)
    assert (layer_of.model_dim, layer_of.router.top_k) == (16, 1)
    assert (run.guard.votes, run.pipeline.schedule) == (3, "terapipe")
    with pytest.raises(ValueError, match="moe.yaml.*: guard.votes=3 is a setting of a run"):
        from_yaml(str(path))
    with pytest.raises(ValueError, match="router.top_k=1 is a setting of a layer, not of a run"):
        run_from_dict({"router": {"top_k": 1}})
    trees = MoEConfig, RunConfig
    sections = [{f.name for f in dataclasses.fields(tree)} for tree in trees]
    assert not sections[0] & sections[1]
    with pytest.raises(ValueError, match="unknown key 'parallel.tries'; did you mean tuner.tries"):
        from_dict({"parallel": {"tries": 3}})


def test_every_setting_of_a_run_has_a_reader_without_a_host() -> None:
    for path in flatten(to_dict(RunConfig())):
        assert re.match("call|pass|use", reader_of(path))


class OneExpert(nn.Module):
    """Everything to expert 0."""

    def forward(self, x_TD: torch.Tensor, *_: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("own, settings, words", [
    ({"experts": lambda _: nn.Linear(16, 16)}, {"expert_activation": "relu"},
     "experts.activation='relu' .* pass your own experts: must be gelu"),
    ({"experts": lambda _: nn.Linear(16, 16)}, {"expert_dropout": 0.1}, "experts.dropout=0.1"),
    ({"router": OneExpert()}, {"router_noise": 1.0}, "router.noise=1.0 .* pass your own router"),
    ({"router": OneExpert()}, {"top_k": 2, "router_normalize": "before_drop"},
     "router.normalize='before_drop' .* pass your own router: must be auto"),
])
def test_settings_of_what_is_replaced_are_refused(own: dict[str, Any], settings: dict[str, Any],
                                                  words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layer(**own, **settings)
    layer(**own, expert_hidden_dim=32, top_k=1)


def test_a_timeout_beside_a_group_is_refused() -> None:
    for build in (lambda **more: MoELayer(16, LocalComm(), **more),
                  lambda **more: replace_ffn(ffn(), comm=LocalComm(), **more)):
        with pytest.raises(ValueError, match="timeout=5.0 cannot be used with a given `comm`"):
            build(timeout=5.0)
    assert layer(timeout=5.0).config.comm.timeout_s == 5.0


def both(tree: dict[str, Any]) -> None:
    """Build the trees of these settings."""
    from_dict(of_layer(tree))
    run_from_dict(of_run(tree))


# of a method that was not chosen
UNREAD: list[tuple[dict[str, Any], str]] = [
    ({"comm": {"network": "file"}}, "comm.network='file' .* none where comm.collectives=native"),
    ({"offload": {"path": "folder"}}, "offload.path='folder' .* none where .*activations=keep"),
    ({"offload": {"activations": "recompute", "smallest": "1MiB"}},
     "offload.smallest='1MiB' .* 64KiB where offload.activations=recompute"),
    ({"guard": {"assignment": "mols"}}, "guard.assignment='mols' .* cyclic where guard.votes=0"),
    ({"guard": {"aggregate": "median"}}, "guard.aggregate='median' .* mean where guard.votes=0"),
    ({"experts": {"compute": "loop", "precision": "tf32"}},
     "experts.precision='tf32' .* ieee where experts.compute=loop, .* use experts.compute=kernels"),
    ({"experts": {"dropout": 0.1, "precision": "tf32"}},
     "experts.precision='tf32' .* ieee where experts.dropout=0.1, .* use experts.dropout=0"),
    ({"experts": {"cache": "2GiB"}}, "experts.cache='2GiB' .* 0 where experts.store=device"),
    ({"experts": {"cache_policy": "lfu"}}, "experts.cache_policy='lfu' .* lru where"),
    ({"experts": {"store_throttle": 1.0}}, "experts.store_throttle=1.0 .* 0.0 where"),
    ({"experts": {"store": "host", "store_path": "folder"}},
     "experts.store_path='folder' .* none where experts.store=host"),
    ({"router": {"name": "switch,topk", "cosine_dim": 3}},
     "router.cosine_dim=3 .* 256 where router.name='switch,topk'.* use router.name=cosine"),
    ({"router": {"name": "sam", "groups": 2, "group_scores": 1}}, "router.group_scores=1"),
    ({"router": {"bias_rate": 0.1}}, "router.bias_rate=0.1 .* router.name=sigmoid_bias"),
    ({"router": {"hash": {"vocabulary": 3}}}, "router.hash.vocabulary=3 .* router.name=hash"),
    ({"router": {"sparsity": {"steps": 3}}}, "router.sparsity.steps=3"),
    ({"router": {"name": "sinkhorn", "score": "sigmoid"}},
     "router.score='sigmoid' .* softmax where router.name='sinkhorn', .* use router.name=topk"),
    ({"router": {"name": "sigmoid_bias", "group_scores": 2}},
     "router.group_scores=2 .* 0 where router.groups=0"),
    ({"router": {"name": "hash", "hash": {"kind": "file", "path": "table.txt", "seed": 3}}},
     "router.hash.seed=3 .* 0 where router.hash.kind=file"),
    ({"router": {"links": {"quota": 0.3}}}, "router.links.quota=0.3 .* use router.name=topology_q"),
    ({"router": {"links": {"pair_capacity": 1.0}}}, "pair_capacity=1.0 .* router.name=ta_moe"),
    ({"router": {"links": {"blend": 0.5}}}, "links.blend=0.5 .* without losses.ta_moe"),
    ({"router": {"name": "topology_quota", "links": {"far": 3.0}}}, "links.far=3.0"),
    ({"router": {"name": "topk,hash", "selection": {"rule": "cycle", "seed": 3}}},
     "router.selection.seed=3 .* 0 where router.selection.rule=cycle"),
]


@pytest.mark.parametrize("tree, words", UNREAD)
def test_parameters_of_a_method_that_was_not_chosen_are_refused(tree: dict[str, Any],
                                                                words: str) -> None:
    with pytest.raises(ValueError, match=words) as found:
        both(tree)
    assert "which does not read it; leave it out, or use " in str(found.value)


@pytest.mark.parametrize("compute", [*MULTIPLY_BY_TORCH, "kernels", "auto", "of_a_user"])
@pytest.mark.parametrize("precision", ["ieee", "tf32", *ROUNDED])
def test_a_precision_that_the_compute_strategy_does_not_read_is_refused(compute: str,
                                                                        precision: str) -> None:
    tree = {"experts": {"compute": compute, "precision": precision}}
    if precision == "tf32" and compute in MULTIPLY_BY_TORCH:
        with pytest.raises(ValueError, match=f"must be ieee where experts.compute={compute}"):
            from_dict(tree)
    else:
        assert from_dict(tree).experts.precision == precision


def test_every_strategy_either_multiplies_by_torch_or_reads_the_precision() -> None:
    ours = {e.name for e in strategies if e.value.__module__.startswith("moe_plugin.")}
    assert ours == {*MULTIPLY_BY_TORCH, "kernels", "auto"}


@pytest.mark.parametrize("parallel, tuner, words", [
    ({"mode": "fixed"}, {"max_d": 8}, "tuner.max_d=8 .* 4 where parallel.mode=fixed"),
    ({"mode": "predicted"}, {"tries": 2}, "tuner.tries=2 .* where parallel.mode=predicted"),
    ({"mode": "fixed", "guests": 3}, {}, "parallel.guests=3 .* 2 where parallel.spill=never"),
    ({"spill": "never", "speeds": "1"}, {}, "parallel.speeds='1' .* none where parallel.spill=nev"),
    ({"replan": 3}, {}, "parallel.replan=3 .* use parallel.spill=standing"),
    ({"schedule": "s1"}, {}, "parallel.schedule='s1' .* auto where parallel.replicas=1"),
])
def test_parameters_of_a_layout_that_was_not_chosen_are_refused(
        parallel: dict[str, Any], tuner: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_dict({"parallel": parallel, "tuner": tuner})


def test_a_layout_that_is_left_open_may_read_less_once_the_ranks_are_known() -> None:
    built = MoELayer(16, tuner={"tries": 3}, parallel={"guests": 3})
    assert built.config.parallel.mode == "fixed" and built.config.tuner.tries == 3


@pytest.mark.parametrize("tree", [
    {"comm": {"collectives": "auto", "network": "dgx-a100:1"}},
    {"offload": {"weights": "host", "path": "folder"}},
    {"offload": {"activations": "keep,swap", "path": "folder", "smallest": "1MiB"}},
    {"offload": {"activations": "auto", "memory": "1GiB", "smallest": "1MiB"}},
    {"guard": {"votes": 3, "assignment": "mols", "aggregate": "median"}},
    {"experts": {"store": "disk", "store_path": "folder", "cache": "1GiB", "cache_policy": "lfu"}},
    {"router": {"name": "topk,hash", "hash": {"vocabulary": 3}}},
    {"router": {"name": "my_own", "cosine_dim": 3, "sparsity": {"steps": 3},
                "links": {"far": 3.0}}},
    {"router": {"links": {"far": 3.0, "blend": 0.5}}, "losses": {"ta_moe": 0.1}},
    {"parallel": {"guests": 3, "speeds": "1,1"}, "tuner": {"max_d": 8, "device": "file"}},
    {"parallel": "fixed", "tuner": {"device": "file"}},
])
def test_what_may_be_read_is_taken(tree: dict[str, Any]) -> None:
    """A layout that is left open is decided by the group: on another one it may be read."""
    both(tree)


def test_the_routers_of_this_package_are_known() -> None:
    ours = {name for name in routers.names() if routers.get(name).__module__.startswith(
        "moe_plugin.")}
    assert ours == built_in().keys()
    fields = {f.name for f in dataclasses.fields(MoEConfig().router)}
    declared = frozenset().union(*built_in().values())
    assert {setting.split("=")[0] for setting in declared} <= fields


# settings that a router either reads, so that something changes, or refuses; sigmoid_bias always
# takes a sigmoid
CHANGES = [("score", "sigmoid"), ("noise", 3.0), ("input_jitter", 0.5),
           ("input_dropout", 0.5),
           ("second_expert_policy", "random"), ("second_expert_policy", "sampling"),
           ("normalize", "before_drop"), ("normalize", "after_drop"), ("normalize", "none"),
           ("batch_prioritized", True), ("top_k", 4), ("scaling", 2.0), ("force", "balance")]
# what is the same as the default there: sigmoid_bias always takes a sigmoid, gshard drops at random
SAME = {("sigmoid_bias", "score", "sigmoid"), ("gshard", "second_expert_policy", "random")}
# routers that `normalize: before_drop`, which is the default with two choices, divides weights of
DIVIDE = {"topk", "cosine", "group_limited", "gshard", "quantile", "sam", "sigmoid_bias",
          "softmax_bias", "ta_moe", "topology_quota"}


@pytest.mark.parametrize("name", sorted(built_in()))
@pytest.mark.parametrize("setting, value", CHANGES)
def test_what_a_router_does_not_read_it_refuses(name: str, setting: str, value: Any) -> None:
    """With two choices, a training capacity and a loss, a setting changes something, or is refused
    with the value, the routers that read it and the remedy.
    """
    results, given = [], {"name": name, **NEEDED.get(name, {})}
    try:
        from_dict({"router": {**given, setting: value}})
    except ValueError as error:
        words = f"router.{setting}={value!r} .*which does not read it; leave it out, or use router"
        assert re.search(words, str(error)), error
        assert value in (4, True) or name not in (DIVIDE if setting == "normalize" else ("topk",))
        return
    # with 1.0 balanced routers drop nothing
    factor = 0.1 if setting == "batch_prioritized" else 1.0
    for more in ({}, {setting: value}):
        torch.manual_seed(0)
        built = MoELayer(8, num_experts=8, router={**given, **more}, losses={"gshard": 1.0},
                         dispatch={"capacity_factor": factor})
        out = built(torch.randn(32, 8), info=TokenInfo(token_ids_T=torch.arange(32) % 7))
        results.append((out.output, *out.losses.values()))
    alike = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    same = (name, setting, value) in SAME or (
        (setting, value) == ("normalize", "before_drop" if name in DIVIDE else "none"))
    assert alike == same


def test_one_choice_is_not_divided_and_teaches_the_router() -> None:
    """Its weight is its score; divided by its sum it would be 1 and have no gradient."""
    layer = MoELayer(8, num_experts=4, top_k=1)
    x_TD = torch.randn(16, 8)
    scores_TE = torch.softmax(x_TD @ layer.router.weight_ED.T, 1)
    weights_TK = layer.router(x_TD).weights_TK
    torch.testing.assert_close(weights_TK[:, 0], scores_TE.max(1)[0])
    layer(x_TD).output.square().sum().backward()
    assert layer.router.weight_ED.grad.abs().max() > 1e-6
    for value in ("before_drop", "after_drop"):
        with pytest.raises(ValueError, match=f"router.normalize='{value}' .* must be auto where "
                           r"router.top_k=1 \(a weight over itself is always 1\).* leave it "
                           "out, or raise router.top_k, or use always to divide nevertheless"):
            MoELayer(8, num_experts=4, top_k=1, router_normalize=value)
    MoELayer(8, num_experts=4, top_k=1, router_normalize="none")
    always = MoELayer(8, num_experts=4, top_k=1, router_normalize="always")
    assert torch.equal(always.router(x_TD).weights_TK, torch.ones(16, 1))
    always(x_TD).output.square().sum().backward()
    assert not always.router.weight_ED.grad.any()
    with pytest.raises(ValueError, match="router.top_k=1 .* must be > 1 where .*noisy_topk"):
        MoELayer(8, num_experts=4, top_k=1, router="noisy_topk")


@pytest.mark.parametrize("names, top_k, read", [
    ("topk", 2, {"second_expert_policy", "normalize"}), ("topk", 1, {"second_expert_policy"}),
    ("switch", 2, set()), ("gshard", 2, {"normalize"}), ("hash,topk", 2, {
        "second_expert_policy", "normalize"}), ("ktop1", 2, {"normalize"}),
    ("own_router", 2, {"second_expert_policy", "normalize"})])
def test_a_host_passes_on_what_a_router_reads(names: str, top_k: int, read: set[str]) -> None:
    given = {"num_experts": 4, "router.second_expert_policy": "sampling",
             "router.normalize": "after_drop"}
    passed = only_read(given, router_names(names), top_k)
    assert passed == {path: value for path, value in given.items()
                      if path.removeprefix("router.") in read | {"num_experts"}}


def test_routers_say_how_many_experts_a_token_has() -> None:
    config = from_dict({"router": {"name": "switch"}}).router
    assert (config.experts_per_token, config.most_per_token(8)) == (1, 1)
    config = from_dict({"router": {"name": "switch,topk", "top_k": 3}}).router
    assert (config.experts_per_token, config.most_per_token(8)) == (3, 3)
    config = from_dict({"router": {"name": "expert_choice"}}).router
    assert (config.experts_per_token, config.most_per_token(8)) == (2, 8)
    config = from_dict({"router": {"name": "dense_to_sparse"}}).router
    assert (config.experts_per_token, config.most_per_token(8)) == (2, 8)


def test_a_shared_expert_beside_own_experts_reads_what_it_is_built_from() -> None:
    settings = {"expert_kind": "gated_ffn", "expert_activation": "silu", "expert_bias": False}
    layer = MoELayer(8, num_experts=2, experts=lambda index: torch.nn.Linear(8, 8),
                     shared_expert_hidden_dim=16, **settings)
    assert layer(torch.randn(3, 8)).output.shape == (3, 8)
    with pytest.raises(ValueError, match="experts.kind='gated_ffn' has no effect"):
        MoELayer(8, num_experts=2, experts=lambda index: torch.nn.Linear(8, 8), **settings)


def test_a_file_is_read_with_the_flags_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text("router: {hash: {vocabulary: 50257}}\nexperts: {cache: 2GiB}\n")
    flags = {"moe_config": str(path), "moe_router": "hash", "moe_experts_on": "host"}
    assert config_from_flags(flags).router.hash.vocabulary == 50257
    assert file_settings(flags)["experts.cache"] == "2GiB"
    with pytest.raises(ValueError, match="which does not read it"):
        config_from_flags({**flags, "moe_router": "topk"})  # the file alone has it, too
    with pytest.raises(ValueError, match="which does not read it"):
        from_yaml(str(path))


@pytest.mark.parametrize("text, flags, left_out", [
    ("router: {noise: 1.0, top_k: 4}", {"moe_router": "hash", "moe_hash_vocabulary": "7"},
     "router.noise=1.0, router.top_k=4"),
    ("parallel: auto\ntuner: {tries: 3}", {"moe_parallel": "fixed"}, "tuner.tries=3"),
    ("experts: {store: host, cache: 2GiB}", {"moe_experts_on": "device"}, "experts.cache='2GiB'"),
    ("guard: {votes: 3, aggregate: median}", {"moe_votes": "0"}, "guard.aggregate='median'"),
    ("dispatch: {name: padded, capacity_factor: 1.0}", {"moe_capacity_factor": "none"},
     "dispatch.name='padded'"),
])
def test_a_flag_overrides_what_only_the_file_would_read(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, flags: dict[str, str],
        left_out: str) -> None:
    """It is said in one line, and once; a flag's own setting that nothing reads is an error."""
    path = tmp_path / "moe.yaml"
    path.write_text(text)
    given = {"moe_config": str(path), **flags}
    with caplog.at_level("INFO", logger="moe_plugin.config.flags"):
        for _ in range(2):
            config_from_flags(given)
            run_from_flags(given)
    assert [record.getMessage() for record in caplog.records] == [
        f"left out of {str(path)!r}, because the flags make it ineffective: {left_out}"]
    wrong = {"moe_router": ("moe_router_noise", "1.0"),
             "moe_votes": ("moe_vote_aggregate", "median")}
    for name, (flag, value) in wrong.items():
        if name in flags:
            with pytest.raises(ValueError, match="which does not read it"):
                config_from_flags({**given, flag: value})
                run_from_flags({**given, flag: value})
