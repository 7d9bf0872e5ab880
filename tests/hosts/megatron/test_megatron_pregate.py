"""Pre-gates in Megatron's model: stages, recomputation, steps, checkpoints of ordinary gates."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.routing.pregate import has_own_gate
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, RECOMPUTE, TP2, ran, refusal

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
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


STAGES = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]


@pytest.mark.parametrize(("world", "layers", "sizes"),
                         [(2, 8, STAGES), (4, 2, [*EP2, *TP2])],
                         ids=["two by two stages", "EP2 TP2"])
def test_recomputation_changes_nothing(world: int, layers: int, sizes: list[str],
                                       data: str, tmp_path: Path) -> None:
    """From the same checkpoint of ordinary gates."""
    argv = [*MODEL, "--data-path", data, "--train-iters", "3", "--optimizer", "sgd",
            "--num-layers", str(layers), "--clip-grad", "1.0", "--global-batch-size", "4",
            *sizes]
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
        assert len(own) == (2 if sizes is STAGES else 1) and len(own[0]) > 1


def test_what_does_not_fit_is_named(data: str) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "1", "--moe-pre-gate", "1"]
    assert "router.pre_gate=1 cannot be used with Megatron's own router" in on_ranks(
        1, refusal, [*argv, "--moe-router-load-balancing-type", "sinkhorn"])[0]
