"""Lists of routers, own modules and deterministic mode in Megatron's layer and training script.

Also:

* Pre-gates in Megatron's model: stages, recomputation, steps, checkpoints of ordinary gates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.routing.pregate import has_own_gate
from tests.hosts.megatron.layers import Case, batch, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.test_megatron_routers import _layer
from tests.hosts.megatron.training import (
    EP2,
    MODEL,
    PP2,
    RECOMPUTE,
    TP2,
    argv_for,
    ran,
    trained,
)


def _aux(argv: list[str], folder: str, *sizes: str, world: int) -> list[dict[str, Any]]:
    return on_ranks(world, _train_aux, [*argv, "--load", folder, *sizes])[0]


def _train_aux(argv: list[str]) -> list[dict[str, Any]]:
    return [{"aux": r["aux_losses"], "norm": r["grad_norm"], "loss": r["lm_loss"]}
            for r in ran(argv).steps_logged]


AUX = ["--train-iters", "3", "--num-layers", "4", "--moe-aux-loss-coeff", "10",
       "--moe-z-loss-coeff", "1"]
VIRTUAL = [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]


@pytest.fixture(scope="module")
def one_stage(data: str, tmp_path_factory: pytest.TempPathFactory,
              ) -> tuple[list[str], Path, list[dict[str, Any]]]:
    """Arguments, the folder of a checkpoint after one step, and the next two steps of one stage
    without recomputation.
    """
    argv, folder = [*MODEL, "--data-path", data, *AUX], tmp_path_factory.mktemp("one stage")
    on_ranks(1, trained, [*argv, "--train-iters", "1", "--save", str(folder)])
    return argv, folder, _aux(argv, str(folder), world=1)


@pytest.mark.parametrize("sizes", [
    pytest.param([*PP2, *RECOMPUTE], marks=pytest.mark.slow),
    [*VIRTUAL, "--recompute-granularity", "selective", "--recompute-modules", "moe"]],
    ids=["stages", "virtual stages"])
def test_balance_losses_count_once_over_stages_virtual_stages_micro_batches_and_recomputation(
        sizes: list[str], one_stage: Any) -> None:
    """Logged values, and gradient norms in which the balance losses weigh much, are those of one
    stage without recomputation.
    """
    argv, folder, want = one_stage
    assert len(want) == 2 and all(
        set(r["aux"]) == {"load_balancing_loss", "z_loss"} and all(v > 0
                                                                   for v in r["aux"]["z_loss"])
        for r in want)
    got = _aux(argv, str(folder), *sizes, world=2)
    for mine, theirs in zip(got, want, strict=True):
        for name, values in theirs["aux"].items():
            assert mine["aux"][name] == pytest.approx(values, rel=1e-3), name
        assert (mine["norm"], mine["loss"]) == pytest.approx((theirs["norm"], theirs["loss"]),
                                                             rel=1e-3)


@pytest.mark.slow
def test_norms_show_how_much_the_balance_losses_weigh(one_stage: Any) -> None:
    argv, folder, want = one_stage
    light = _aux([*argv, "--moe-aux-loss-coeff", "5"], str(folder), world=1)
    assert abs(light[0]["norm"] / want[0]["norm"] - 1) > 1e-2


def test_one_rank_goes_on_with_what_virtual_stages_saved(one_stage: Any, tmp_path: Path) -> None:
    argv, folder, want = one_stage
    on_ranks(2, trained, [*argv, "--load", str(folder), *VIRTUAL, "--train-iters", "2", "--save",
                          str(tmp_path)])
    assert _aux(argv, str(tmp_path), world=1)[0]["loss"] == pytest.approx(want[-1]["loss"],
                                                                          rel=1e-3)


def _overlapped(case: Case) -> list[tuple[str, list[float]]]:
    """Megatron's wrapper with overlapped gradient reduction, which waits for every parameter of a
    bucket.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from moe_plugin.routing import finish_step

    initialise_parallel(case)
    layer = _layer(case, "switch",
                   **{"router.name": "switch,base,expert_choice", "router.selection.rule": "cycle"})
    wrapped = DistributedDataParallel(case.config(),
                                      DistributedDataParallelConfig(overlap_grad_reduce=True),
                                      layer)
    seen = []
    for _ in range(4):
        wrapped.zero_grad_buffer()
        x, weigh, _ = batch(case)
        (wrapped(x)[0] * weigh).sum().backward()
        wrapped.finish_grad_sync()
        grads = [float(one.weight_ED.main_grad.abs().sum()) for one in layer.router.routers]
        seen.append((layer.last_stats.router, grads))
        finish_step(layer.router)
    return seen


def test_the_wrapper_does_not_wait_for_idle_routers() -> None:
    one, two = on_ranks(2, _overlapped, Case(ep=2))
    assert one == two and [gate for gate, _ in one] == ["switch", "base", "expert_choice", "switch"]
    for step, (_, grads) in enumerate(one):
        assert [g > 0 for g in grads] == [i == step % 3 for i in range(3)]


def _numbers() -> list[list[Any]]:
    from types import SimpleNamespace

    from moe_plugin.hosts.megatron.losses import in_model, moe_layers_before, trace_key

    every, pattern = SimpleNamespace(num_layers=6, moe_layer_freq=2), SimpleNamespace(
        num_layers=4, moe_layer_freq=[0, 1, 1, 0])
    hybrid = SimpleNamespace(num_layers=4, moe_layer_freq=1, is_hybrid_model=True)
    return [[moe_layers_before(hybrid, 2)], [moe_layers_before(every, n) for n in (1, 3, 5)],
            [moe_layers_before(pattern, n) for n in (2, 3)],
            [moe_layers_before(pattern, in_model(n, pattern, n < 5)) for n in (1, 2, 5)],
            [trace_key(in_model(n, pattern, mtp, prediction) or 0, pattern, prediction)
             for n, mtp, prediction in ((3, False, None), (2, True, None), (1, True, 0),
                                        (2, True, 1))]]


def test_moe_layers_are_numbered_by_megatrons_pattern() -> None:
    assert on_ranks(1, _numbers) == [[[None], [0, 1, 2], [0, 1], [2, 3, 2], [
        ("decoder", None, 2), ("mtp", 1, 0), ("mtp", 0, 0), ("mtp", 1, 1)]]]


def _replayed(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    """Loads of a recorded pass, and of a replayed one under other weights, by micro-batch."""
    from moe_plugin.routing.replay import record_routing, replay_routing

    initialise_parallel(case)
    layer, loads = _layer(case, "base"), []
    x, _, _ = batch(case)
    with record_routing() as tape:
        for part in (x, -x):
            layer(part)
            loads.append(layer.last_stats.load_KE[0].tolist())
    with torch.no_grad():
        layer.router.weight_ED.normal_()
    again = []
    with replay_routing(tape):
        for part in (x, -x):
            layer(part)
            again.append(layer.last_stats.load_KE[0].tolist())
    return loads, again


def test_recorded_routing_is_replayed_over_ranks() -> None:
    for loads, again in on_ranks(2, _replayed, Case(ep=2)):
        assert loads == again


RECOMPUTED = {
    "nothing": [],
    "layer by layer": RECOMPUTE,
    "by two layers": [*RECOMPUTE[:-1], "2"],
    "the first layer": ["--recompute-granularity", "full", "--recompute-method", "block",
                        "--recompute-num-layers", "1"],
    "experts": ["--recompute-granularity", "selective", "--recompute-modules", "moe"],
}


def _curve(argv: list[str]) -> tuple[list[tuple[float, ...]], list[list[bool]]]:
    """Losses and gradient norms; by chunk, which layers choose for themselves."""
    run = ran(argv)
    own = [[has_own_gate(layer.moe) for layer in chunk.modules()
            if type(layer).__name__ == "PluginMoELayer"] for chunk in run.chunks]
    return [(r["lm_loss"], r["grad_norm"], r["aux_losses"]["load_balancing_loss"][0])
            for r in run.steps_logged], own


@pytest.mark.parametrize(("world", "layers", "sizes"),
                         [(2, 8, VIRTUAL), (4, 2, [*EP2, *TP2])],
                         ids=["two by two stages", "EP2 TP2"])
def test_recomputation_changes_nothing(world: int, layers: int, sizes: list[str],
                                       data: str, tmp_path: Path) -> None:
    """From the same checkpoint of ordinary gates."""
    argv = argv_for(data, 3, "--optimizer", "sgd", "--num-layers", str(layers), "--clip-grad",
                    "1.0", "--global-batch-size", "4", *sizes)
    saved = str(tmp_path)
    on_ranks(world, _curve, [*argv, "--save", saved, "--exit-interval", "1"])
    argv += ["--load", saved]
    ordinary = on_ranks(world, _curve, argv)
    gated = ["--moe-pre-gate", "1"]
    plain, *others = (on_ranks(world, _curve, [*argv, *gated, *more])
                      for more in RECOMPUTED.values())
    for other in others:
        assert [curve for curve, _ in other] == [curve for curve, _ in plain]
    for (before, _), (curve, own) in zip(ordinary, plain, strict=True):
        assert len(curve) == 2
        assert all(a != b for a, b in zip(before, curve, strict=True))
        # the first block of each stage has a gate of its own
        assert all(chunk == [True, *[False] * (len(chunk) - 1)] for chunk in own)
        assert len(own) == (2 if sizes is VIRTUAL else 1) and len(own[0]) > 1
