"""Megatron's recomputation around our layer, with dropout and a router that draws or adds up: the
same bits as without it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.layers import Case, batch, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.test_megatron_routers import _layer
from tests.hosts.megatron.training import MODEL, PP2, ran

pytestmark = pytest.mark.megatron

# (settings of ours, Megatron's own)
DRAWING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({}, {}) for name in ("gshard", "noisy_topk", "dense_to_sparse", "base", "sparsemixer",
                             "quantile", "sigmoid_bias")},
    "topk": ({"router.second_expert_policy": "sampling"}, {}),
    "switch": ({"router.input_dropout": 0.3}, {"moe_input_jitter_eps": 0.2}),
}
FULL = ["--recompute-granularity", "full", "--recompute-num-layers"]


def _step(way: str, case: Case, name: str, settings: dict[str, Any]) -> list[torch.Tensor]:
    """Gradients, buffers and the generator's state after a step of two micro-batches whose backward
    passes come in reverse order; before it a pass without gradients, and one without backward.
    """
    from megatron.core import tensor_parallel

    from moe_plugin.routing import finish_step

    layer = _layer(case, name, **settings)

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(layer(F.dropout(x, 0.1))[0], 0.5)

    def passed(x: torch.Tensor) -> torch.Tensor:
        if way != "full":
            return block(x)
        return tensor_parallel.checkpoint(block, False, x)

    x, weigh, _ = batch(case)
    torch.manual_seed(4)
    with torch.no_grad():
        passed(x[:5])
    passed(x.flip(0).requires_grad_())
    finish_step(layer)
    xs = [part.clone().requires_grad_() for part in (x, x.flip(0))]
    for y in [passed(part) for part in xs][::-1]:
        (y * weigh).sum().backward()
    finish_step(layer)
    return [*(part.grad for part in xs), *(p.grad for p in layer.parameters()), *layer.buffers(),
            torch.get_rng_state()]


def _ways(sizes: dict[str, int]) -> dict[str, dict[str, bool]]:
    ways = {"kept": {}, "full": {"recompute_granularity": "full", "recompute_method": "uniform",
                                 "recompute_num_layers": 1},
            "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}}
    initialise_parallel(Case(**sizes))
    found: dict[str, dict[str, bool]] = {}
    for name, (settings, more) in DRAWING.items():
        steps = {way: _step(way, Case(native={"moe_aux_loss_coeff": 0.01, **native, **more},
                                      **sizes), name, settings) for way, native in ways.items()}
        found[name] = {way: all((a is None) == (b is None) and (a is None or torch.equal(a, b))
                                for a, b in zip(step, steps["kept"], strict=True))
                       for way, step in steps.items()}
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [{}, {"ep": 2}], ids=["one rank", "EP2"])
def test_a_layer_has_the_bits_of_one_that_keeps_its_activations(sizes: dict[str, int]) -> None:
    for found in on_ranks(max(sizes.values(), default=1), _ways, sizes):
        assert set(found) == set(DRAWING)
        assert not {name: same for name, same in found.items() if not all(same.values())}


def _curve(argv: list[str]) -> list[tuple[Any, ...]]:
    return [(r["lm_loss"], r["grad_norm"], r["aux_losses"]) for r in ran(argv).steps_logged]


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [[], [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]],
                         ids=["one stage", "interleaved stages"])
def test_a_run_has_the_losses_and_norms_of_one_that_keeps_its_activations(
        sizes: list[str], data: str) -> None:
    argv = [*MODEL, "--num-layers", "4", "--data-path", data, "--train-iters", "2",
            "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--moe-router", "gshard",
            *sizes]
    again = [[*FULL, "1", "--recompute-method", "uniform"],
             [*FULL, "1", "--recompute-method", "block"],
             ["--recompute-granularity", "selective", "--recompute-modules", "moe"]]
    kept, *others = (on_ranks(2 if sizes else 1, _curve, [*argv, *way]) for way in ([], *again))
    assert len(kept[0]) == 2 and others == [kept] * 3
