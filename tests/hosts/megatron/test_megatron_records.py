"""What runs leave behind: one report over two stages, the records of a script that the launcher
starts.

Also:

* Statistics of layers with Megatron's own router, against counts of what that router returns.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.observe.features import DropCount
from moe_plugin.observe.findings import findings
from moe_plugin.observe.history import read_run
from moe_plugin.observe.layer_rules import RECENT
from tests.hosts.megatron.layers import EXPERTS, Case, batch, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, PP2, argv_for, launched, trained


def test_a_run_over_two_stages_has_one_report(data: str, tmp_path: Path) -> None:
    from moe_plugin.observe.report.page import render

    files = [
        "--log-file",
        str(tmp_path / "log.jsonl"), "--moe-stats-jsonl",
        str(tmp_path / "stats.jsonl"), "--moe-stats-interval", "1", "--moe-stats-timeline", "2"
    ]
    on_ranks(2, trained, argv_for(data, 3, *files, *PP2))
    run = read_run(tmp_path)
    assert [r.step for r in run.steps
            ] == [1, 2, 3] and run.host == "megatron" and run.total_steps == 3 and run.notes == []
    assert run.changed is not None and run.settings["train-iters"] == "3"
    assert run.changed["moe-z-loss-coeff"][1] == "–" and "seed" not in run.changed
    # as the command has them: none that Megatron derives
    assert run.changed["train-iters"] == ("3", "–")
    assert not {"kv-channels", "padded-vocab-size", "world-size"} & set(run.changed)
    assert {name: [r.step for r in records]
            for name, records in run.layers.items()} == {"layer1": [1, 2, 3], "layer2": [1, 2, 3]}
    shown = {
        rank: {s.name for s in spans if s.track == "layers"}
        for (_, rank), spans in run.timelines.items()
    }
    assert shown == {
        0: {"layer1 forward", "layer1 backward"}, 1: {"layer2 forward", "layer2 backward"}
    }
    assert 'id="timeline-1"' in render(run)


@pytest.mark.parametrize("sizes", [EP2, PP2], ids=["EP2", "PP2"])
def test_a_launched_script_writes_records_and_hands_over_token_ids(sizes: list[str], data: str,
                                                                    tmp_path: Path) -> None:
    files = ["--moe-stats-jsonl", str(tmp_path / "stats.jsonl"), "--moe-stats-interval", "2",
             "--moe-stats-timeline", "3"]
    launched(["--moe-aux-loss-coeff", "0", "--moe-router", "hash", "--moe-hash-vocabulary", "384",
              "--moe-z-loss-coeff", "0", "--data-path", data, "--train-iters", "4", *files, *sizes],
             2, tmp_path)
    rows = [json.loads(line) for path in sorted(tmp_path.glob("stats.jsonl*"))
            for line in path.read_text().splitlines()]
    balance = sorted((row["step"], row["layer"]) for row in rows if "layer" in row)
    assert balance == [(2, "layer1"), (2, "layer2"), (4, "layer1"), (4, "layer2")]
    calls = {row["calls"] for row in rows if "layer" in row}
    # two steps of all micro-batches and ranks of a stage
    assert calls == {8} and all(row["step"] == 3 for row in rows if "timeline" in row)
    assert len([row for row in rows if "timeline" in row]) == (2 if sizes == PP2 else 1)
    steps = [r for r in read_run(tmp_path).steps if r.loss is not None]
    assert [r.step for r in steps] == [2, 4]
    assert all(0 < r.loss < 10 and r.tokens_per_s > 0 and not r.not_finite for r in steps)


def test_drops_and_losses_of_megatrons_own_router_are_found_in_the_record(
        data: str, tmp_path: Path) -> None:
    on_ranks(1, trained, argv_for(
        data, RECENT, "--num-experts", "8", "--moe-expert-capacity-factor", "1.0",
        "--moe-stats-jsonl", str(tmp_path / "stats.jsonl"), "--moe-stats-interval", "1"))
    run = read_run(tmp_path)
    for records in run.layers.values():
        assert all(r.losses.keys() == {"load_balancing_loss", "z_loss"} for r in records)
        assert all(r.losses["load_balancing_loss"] >= 1 for r in records)
    found = {one.rule: one for one in findings(run)}
    assert found["drops"].layers and "no_balance" not in found
    share = max(sum(r.drop_fraction for r in records) / RECENT for records in run.layers.values())
    assert found["drops"].title.startswith(f"{100 * share:.0f} % of the choices are dropped in")


CAPACITY = {"moe_expert_capacity_factor": 0.5}
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
POSITION = {**CAPACITY, "moe_token_drop_policy": "position"}
PADDED = {"moe_pad_expert_input_to_capacity": True}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "probs": CAPACITY, "position": POSITION, "padded": {**CAPACITY, **PADDED},
    "position, padded": {**POSITION, **PADDED},
    "padded beyond any load": {"moe_expert_capacity_factor": 1.9, **PADDED},
    "capacity above the tokens": {"moe_expert_capacity_factor": 9.0},
    "bias": BIAS, "bias, capacity": {**BIAS, **CAPACITY},
    "groups": GROUPS, "groups, capacity": {**GROUPS, **CAPACITY},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "z loss, jitter, capacity": {**AUX, "moe_z_loss_coeff": 0.01, "moe_input_jitter_eps": 0.3,
                                 **CAPACITY},
    "sequence loss, capacity": {**AUX, "moe_router_load_balancing_type": "seq_aux_loss",
                                **CAPACITY},
    "top-1, weights first, capacity": {
        "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True,
        **CAPACITY},
    "fp64, capacity": {"moe_router_dtype": "fp64", **CAPACITY},
}


def _chosen(layer: Any, case: Case, factor: float | None) -> torch.Tensor:
    """[T, E], True where Megatron's own router chooses an expert under this capacity factor."""
    x, _, padding = batch(case)
    layer.router.config = copy.copy(layer.router.config)
    layer.router.config.moe_expert_capacity_factor = factor
    torch.manual_seed(5)
    given = {} if padding is None else {"padding_mask": padding.t()}
    _, chosen = layer.router(x, **given)
    return chosen.view(-1, EXPERTS).bool()


def _counts(cases: list[Case]) -> list[dict[str, Any]]:
    """What the statistics say, and what Megatron's router says."""
    found = []
    for case in cases:
        initialise_parallel(case)
        native, ours = build(case, False), build(case, True)
        assert ours.plan.native_router, case.native
        for layer in (native, ours):
            if layer.router.state_dict().get("expert_bias") is not None:
                layer.router.expert_bias.copy_(torch.tensor([0.5, -0.5, 0.2, 0.0]))
        x, _, padding = batch(case)
        torch.manual_seed(5)
        ours(x, padding_mask=padding) if padding is not None else ours(x)
        factor = native.config.moe_expert_capacity_factor
        before, after = (_chosen(native, case, f) for f in (None, factor))
        real = torch.ones(len(before), 1) if padding is None else ~padding.t().reshape(-1, 1)
        before, after = before & real.bool(), before & after & real.bool()
        stats = ours.last_stats.as_dict()
        count = DropCount()
        count.add(ours.last_stats)
        found.append({
            "load": (stats["load"], before.sum(0).tolist()),
            "dropped": (stats["dropped"], int(before.sum() - after.sum())),
            "rows": (stats["rows"], int(after.sum())),
            "counted": (count.take(), 1 - int(after.sum()) / int(before.sum())),
            "tokens": (stats["tokens"], int(real.sum())),
        })
    return found


def test_statistics_are_those_of_megatrons_choices() -> None:
    cases = [Case(native=native, padding=padding) for native in SETTINGS.values()
             for padding in (False, True)
             if not (padding and BIAS.items() <= native.items())]  # Megatron's own code fails
    [found] = on_ranks(1, _counts, cases)
    for case, one in zip(cases, found, strict=True):
        for name, (got, want) in one.items():
            assert got == pytest.approx(want), (case.native, case.padding, name)
    dropped = [one["dropped"][0] for one in found]
    assert sum(n > 0 for n in dropped) >= len(found) // 2, dropped


GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
BUFFERS = ("local_tokens_per_expert", "expert_bias", "global_tokens_per_expert", "ga_steps")
# what a run does between two steps that train nothing; the last is a step that is skipped
PASSES = ("train", "validate", "train without gradients", "train", "forward alone")


def _pass(layer: Any, case: Case, kind: str) -> None:
    layer.train(kind != "validate")
    x, weigh, _ = batch(case)
    with torch.set_grad_enabled(kind in ("train", "forward alone")):
        y, _ = layer(x.requires_grad_())
    if kind == "train":
        (y.float() * weigh).sum().backward()


def _counted(cases: list[Case]) -> list[dict[str, Any]]:
    """By pass and buffer: of Megatron's layer, and of ours."""
    found = []
    for case in cases:
        initialise_parallel(case)
        layers = [build(case, ours) for ours in (False, True)]
        assert layers[1].plan.native_router, case.native
        counts: dict[Any, Any] = {}
        for number, kind in enumerate(PASSES):
            for layer in layers:
                _pass(layer, case, kind)
            for name in BUFFERS:
                values = [getattr(layer.router, name, None) for layer in layers]
                if values[0] is not None:
                    counts[number, kind, name] = [value.tolist() for value in values]
        found.append(counts)
    return found


def test_passes_that_train_nothing_count_as_in_megatrons_own_layer() -> None:
    cases = [Case(ep=ep, native={**native, **recomputed}) for ep in (1, 2)
             for native in (BIAS, GLOBAL, {**BIAS, **GLOBAL}) for recomputed in ({}, RECOMPUTED)]
    for world in (1, 2):
        mine = [case for case in cases if case.ep == world]
        for found in on_ranks(world, _counted, mine):
            for case, counts in zip(mine, found, strict=True):
                assert counts
                for cell, (native, ours) in counts.items():
                    assert native == ours, (case.native, world, cell)
                for name in ("local_tokens_per_expert", "global_tokens_per_expert"):
                    seen = [sum(ours) for (_, _, of), (_, ours) in counts.items() if of == name]
                    if not seen:
                        continue
                    assert seen[0] > 0, (case.native, name)
                    assert seen[0] == seen[1] == seen[2], (case.native, name, seen)


def _own_counted(world: int) -> list[dict[str, Any]]:
    """By pass: what Megatron's layer counts, and what ours does with a router of ours."""
    found = []
    for native, theirs, settings, ours in (
            (GLOBAL, "global_tokens_per_expert", {"losses": {"global_batch": 0.1}}, "step_load_E"),
            (BIAS, "local_tokens_per_expert", {"router.name": "sigmoid_bias"}, "load_E")):
        case = Case(ep=world, native=native)
        initialise_parallel(case)
        reference = build(case, False)
        layer = build(Case(ep=world), True, settings)
        assert not layer.plan.native_router
        counts = {}
        for number, kind in enumerate(PASSES):
            for one in (reference, layer):
                _pass(one, case, kind)
            counts[number, kind, ours] = (
                getattr(reference.router, theirs).tolist(),
                getattr(layer.router, ours)[:EXPERTS].tolist())
        found.append(counts)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_routers_of_ours_count_the_passes_that_megatrons_layer_counts(world: int) -> None:
    for counted in on_ranks(world, _own_counted, world):
        for counts in counted:
            for cell, (native, ours) in counts.items():
                assert native == ours and sum(ours) > 0, cell
