"""What `parallel: auto` has learned, in Megatron's checkpoints: every pipeline stage's own layers,
other sizes, checkpoints without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.layers import Case, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, Run, ran

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
AUTO = ["--moe-parallel", "auto", "--moe-overlap-max", "2", "--moe-parallel-samples", "1"]


def _run(argv: list[str]) -> tuple[dict[int, Any], dict[int, Any], list[float]]:
    """Train; (what each layer here knew before its first step, what after its last, losses)."""
    before: dict[int, Any] = {}

    def known(run: Run) -> dict[int, Any]:
        return {
            layer.layer_number: layer.moe.routed_experts.tuner
            and layer.moe.routed_experts.tuner.tuner.state()
            for layer in run.moe_layers()
        }

    run = ran(argv, lambda run: before.update(known(run)))
    return before, known(run), [record["lm_loss"] for record in run.steps_logged]


@pytest.fixture(scope="module")
def argv(data: str) -> list[str]:
    return [*MODEL, "--data-path", data, "--train-iters", "8"]


@pytest.fixture(scope="module")
def tuned(argv: list[str],
          tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, Any], list[float]]:
    """Two stages of two expert-parallel ranks, tuned: (checkpoint after four of eight steps, what
    it holds by layer, losses).
    """
    folder = str(tmp_path_factory.mktemp("tuned"))
    first = on_ranks(4, _run, [*argv, *EP2, *PP2, *AUTO, "--save", folder, "--exit-interval", "4"])
    assert [sorted(after) for _, after, _ in first] == [[1], [1], [2], [2]]
    assert first[0][1] == first[1][1] and first[2][1] == first[3][
        1], "ranks of a group know the same"
    whole = on_ranks(4, _run, [*argv, *EP2, *PP2, *AUTO])
    return folder, {**first[0][1], **first[2][1]}, whole[0][2]


@pytest.mark.parametrize(("world", "sizes"), [(4, [*EP2, *PP2]), (2, EP2)],
                         ids=["the same sizes", "one stage"])
def test_every_stage_knows_again_what_it_had_learned(world: int, sizes: list[str], argv: list[str],
                                                     tuned: Any) -> None:
    folder, saved, losses = tuned
    assert all(state["explored"] > 0 and state["buckets"] for state in saved.values())
    for before, after, curve in on_ranks(world, _run, [*argv, *sizes, *AUTO, "--load", folder]):
        assert before == {layer: saved[layer]
                          for layer in before} and len(before) == (1 if world == 4 else 2)
        assert all(after[layer]["calls"] > saved[layer]["calls"] for layer in after)
        assert curve == pytest.approx(losses[4:], abs=2e-4)


def test_choices_of_other_sizes_are_found_anew(argv: list[str], tuned: Any) -> None:
    [(before, _, curve)] = on_ranks(1, _run, [*argv, *AUTO, "--load", tuned[0]])
    assert all(state["calls"] == 0 and not state["buckets"] for state in before.values())
    assert curve == pytest.approx(tuned[2][4:], abs=2e-4)


def test_checkpoints_load_with_and_without_tuning(argv: list[str], tuned: Any,
                                                  tmp_path: Path) -> None:
    folder = str(tmp_path)
    [(before, _, _)] = on_ranks(
        1, _run, [*argv, "--load", tuned[0], "--save", folder, "--exit-interval", "6"])
    assert before == {1: None, 2: None}
    for before, after, _ in on_ranks(2, _run, [*argv, *EP2, *AUTO, "--load", folder]):
        assert all(state["calls"] == 0
                   for state in before.values()) and all(state["explored"]
                                                         for state in after.values())


def _plain_state_dict() -> tuple[int, int]:
    """(calls that a loaded tuner knows of, how many more after one call of the layer)."""
    case = Case(ep=2)
    initialise_parallel(case)
    auto = {"parallel.mode": "auto", "tuner.samples": 1}
    first, again = build(case, True, auto), build(case, True, auto)
    fixed = build(case, True, {"parallel.mode": "fixed"})
    x = torch.randn(4, 2, 16)
    for _ in range(20):
        first(x)[0].sum().backward()
    again.load_state_dict(first.state_dict())
    fixed.load_state_dict(first.state_dict())
    first.load_state_dict(fixed.state_dict())
    calls = again.moe.routed_experts.tuner.tuner.calls
    assert (again.moe.routed_experts.tuner.tuner.state()
            == first.moe.routed_experts.tuner.tuner.state())
    assert not any("tuner" in key for key in fixed.state_dict())
    again(x)
    return calls, again.moe.routed_experts.tuner.tuner.calls - calls


def test_plain_state_dicts_hold_it_and_the_first_call_looks_at_its_load() -> None:
    for calls, more in on_ranks(2, _plain_state_dict):
        assert calls > 0 and more == 1


def _megatrons_own_load(folder: str) -> int:
    """A checkpoint of a layer that is not tuned, into one that is, by Megatron's functions alone.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from moe_plugin.hosts.megatron.compat.checkpointing import saves_whose_writers_end, wrap

    wrap("save", saves_whose_writers_end)
    initialise_parallel(Case(ep=2))
    fixed, tuned, predicted = (build(Case(ep=2), True, {"parallel.mode": mode})
                               for mode in ("fixed", "auto", "predicted"))
    dist_checkpointing.save(fixed.sharded_state_dict("mlp."), folder)
    dist_checkpointing.load(predicted.sharded_state_dict("mlp."), folder)  # needs no permission
    with torch.no_grad():
        tuned.experts.w_in_LDF.zero_()
    found = dist_checkpointing.load(tuned.sharded_state_dict("mlp."), folder,
                                    strict=StrictHandling.LOG_ALL)
    tuned.load_state_dict({key.removeprefix("mlp."): value for key, value in found.items()})
    assert torch.equal(tuned.experts.w_in_LDF, fixed.experts.w_in_LDF)
    return tuned.moe.routed_experts.tuner.tuner.calls


def test_megatron_loads_a_checkpoint_without_it_where_it_is_told_to(tmp_path: Path) -> None:
    assert on_ranks(2, _megatrons_own_load, str(tmp_path)) == [0, 0]


def _predicted(folder: str) -> tuple[list[str], list[bool]]:
    """(layouts of a layer that has predicted its own, and of one that loads it; whether a layer has
    a layout after it loaded a checkpoint that holds it, and one that does not).
    """
    from megatron.core import dist_checkpointing

    from moe_plugin.hosts.megatron.compat.checkpointing import saves_whose_writers_end, wrap
    from moe_plugin.hosts.megatron.state import load_without_missing

    wrap("load", load_without_missing)
    wrap("load", load_without_missing)  # once is enough
    wrap("save", saves_whose_writers_end)
    initialise_parallel(Case(ep=2))
    first, again, other = (build(Case(ep=2), True, {"parallel.mode": "predicted"})
                           for _ in range(3))
    fixed = build(Case(ep=2), True, {"parallel.mode": "fixed"})
    first(torch.randn(2048, 4, 16))[0].sum().backward()
    layers = ((first, again, "predicted"), (fixed, other, "fixed"))
    for source, target, name in layers:
        Path(folder, name).mkdir(exist_ok=True)
        dist_checkpointing.save({"model": source.sharded_state_dict("mlp.")}, f"{folder}/{name}")
        found = dist_checkpointing.load({"model": target.sharded_state_dict("mlp.")},
                                        f"{folder}/{name}")["model"]
        target.load_state_dict({key.removeprefix("mlp."): value for key, value in found.items()})
    return ([layer.moe.routed_experts.current.label for layer in (first, again)],
            [layer.moe.routed_experts.tuner.settled for layer in (again, other)])


def test_a_distributed_checkpoint_keeps_a_predicted_layout(tmp_path: Path) -> None:
    """One without it loads, too."""
    for layouts, settled in on_ranks(2, _predicted, str(tmp_path)):
        assert layouts[0] == layouts[1] and layouts[0].startswith("r=0"), layouts
        assert settled == [True, False]
