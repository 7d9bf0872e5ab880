"""Megatron's layers that keep, recompute or swap their activations: the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.observe.history import read_run
from moe_plugin.planner.offload.schedule import load_profile
from tests.hosts.megatron.layers import Case, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, Run, ran, refusal

pytestmark = pytest.mark.megatron


def _curve(argv: list[str]) -> tuple[Any, Any]:
    """(losses, norms and balance losses, policies and bytes that were copied) of a run."""
    from moe_plugin.memory.activations.offload import Activations

    used: list[Any] = []

    def built(run: Run) -> None:
        used.append(run.feature(Activations))

    run = ran(argv, built)
    curve = [(r["lm_loss"], r["grad_norm"], r["aux_losses"]) for r in run.steps_logged]
    return curve, used[0] and (used[0].policies, used[0].swapper.copier.counters.bytes)


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [EP2, PP2], ids=["EP2", "PP2"])
def test_losses_are_those_of_keeping(sizes: list[str], data: str, tmp_path: Path) -> None:
    profile = str(tmp_path / "profile.json")
    argv = [*MODEL, "--num-layers", "4", "--data-path", data, "--train-iters", "4",
            "--hidden-dropout", "0.1", "--attention-dropout", "0.1", *sizes]
    moved = ["--moe-activation-path", str(tmp_path), "--moe-activation-smallest", "0"]
    stats = ["--moe-stats-jsonl", str(tmp_path / "stats" / "stats.jsonl"),
             "--moe-stats-interval", "1"]
    ways = [[], ["--moe-activations", "recompute"], ["--moe-activations", "swap", *moved, *stats],
            ["--moe-activations", "auto", "--moe-activation-memory", "400KiB",
             "--moe-activation-profile", profile, *moved],
            ["--moe-activations", "keep,recompute,keep,keep"]]
    pre_gate, stages_layers = ["--moe-pre-gate", "1"], []
    # `auto` swaps in its first step, and recomputes in the next two
    for rank in zip(*(on_ranks(2, _curve, [*argv, *way]) for way in (
            *ways, pre_gate, [*pre_gate, *ways[3]])), strict=True):
        (kept, nothing), *others = rank
        (pre_gated, _), *others_pre_gated = others[4:]
        *others, (named, (given, _)) = others[:4]
        assert [curve for curve, _ in others_pre_gated] == [pre_gated] and pre_gated != kept
        assert nothing is None and len(kept) == 4
        assert [curve for curve, _ in others] == [kept] * 3
        (_, (_, again)), (_, (_, swapped)), (_, (policies, _)) = others
        copied = read_run(tmp_path / "stats").copies["activations"]
        assert sum(record.bytes for record in copied) > 0 and {r.ranks for r in copied} == {2}
        assert again == 0 < swapped and len(policies) == (2 if sizes is PP2 else 4)
        assert set(policies) != {"keep"} and named == kept
        stages_layers.append(given)
    assert sorted(stages_layers) == ([("keep", "keep"), ("keep", "recompute")] if sizes is PP2
                                     else [("keep", "recompute", "keep", "keep")] * 2)
    files = [tmp_path / f"profile.stage{n}.json" for n in range(2)] if sizes is PP2 else [profile]
    assert all(len(load_profile(file).blocks) == len(policies) for file in files)


def _with_graphs(made_by: str) -> str:
    from moe_plugin.config import OffloadConfig
    from moe_plugin.hosts.megatron.script_features import activations_of

    case = Case()
    initialise_parallel(case)
    config = case.config()
    config.cuda_graph_impl = made_by
    with pytest.raises(ValueError) as refused:
        activations_of(OffloadConfig(activations="swap"), config, [])
    return str(refused.value)


def test_graphs_do_not_fit() -> None:
    [said], [without] = (on_ranks(1, _with_graphs, made_by)
                         for made_by in ("transformer_engine", "none"))
    assert "does not fit Megatron's cuda_graph_impl" in said
    assert "no transformer layer" in without


def test_what_does_not_fit_is_refused(data: str) -> None:
    [message] = on_ranks(1, refusal, [
        *MODEL, "--data-path", data, "--train-iters", "2", "--moe-activations", "swap",
        "--recompute-granularity", "selective"])
    assert "does not fit Megatron's recompute_granularity" in message
    [message] = on_ranks(1, refusal, [
        *MODEL, "--data-path", data, "--train-iters", "2", "--moe-activations", "keep,swap,keep"])
    assert "has 3 policies, but the model has 2 layers" in message
