"""Balance losses under `--calculate-per-token-loss`: Megatron then divides the gradients of a step
by its tokens, so that a loss counts once for every token of its micro-batch, on however many ranks
these are. Expected: formulas in float64 over all tokens, one rank with all of them, and Megatron's
own layer from 0.19 on (older ones weigh by the tokens of a rank).
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.routing.losses import losses
from tests.hosts.megatron.layers import (
    BATCH,
    EXPERTS,
    SEQUENCE,
    Case,
    batch,
    build,
    compare,
    draw,
    initialise_parallel,
    needs_padding_mask,
    whole_gradients,
)
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL, PP2, RECOMPUTE, TP2, trained

VERSION = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])


def _switch(p_SBE: Tensor, chosen_SBE: Tensor, _: Tensor) -> Tensor:
    return EXPERTS * (p_SBE.sum((0, 1)) * chosen_SBE.sum((0, 1))).sum() / (
        p_SBE.shape[0] * BATCH * chosen_SBE.sum())


def _gshard(p_SBE: Tensor, chosen_SBE: Tensor, _: Tensor) -> Tensor:
    first_SBE = torch.nn.functional.one_hot(p_SBE.argmax(2), EXPERTS)
    return EXPERTS * (p_SBE.mean((0, 1)) * first_SBE.double().mean((0, 1))).sum()


def _sequence(p_SBE: Tensor, chosen_SBE: Tensor, _: Tensor) -> Tensor:
    return torch.stack([_switch(p_SBE[:, [b]] / BATCH, chosen_SBE[:, [b]], _) * BATCH**2
                        for b in range(BATCH)]).mean()


def _z(_: Tensor, __: Tensor, logits_SBE: Tensor) -> Tensor:
    return logits_SBE.logsumexp(2).square().mean()


@dataclass(frozen=True)
class Kind:
    """A loss. formula: of probabilities, choices and logits [S, B, E] of all tokens."""

    formula: Any
    native: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def _megatrons(kind: str, formula: Any, **more: Any) -> Kind:
    return Kind(formula, {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 1.0,
                          **more})


FLOAT64 = {"moe_router_dtype": "fp64"}  # Megatron's own router, as for the two other types
OURS = {
    "switch": _megatrons("aux_loss", _switch),
    "z": Kind(_z, {"moe_z_loss_coeff": 1.0}),
    **{name: Kind(formula, settings={"losses": {name: 1.0}}) for name, formula in (
        ("gshard", _gshard), ("sequence", _sequence), ("global_batch", _switch),
        ("ta_moe", _switch))}}
NATIVE = {
    "native switch": _megatrons("aux_loss", _switch, **FLOAT64),
    "native sequence": _megatrons("seq_aux_loss", _sequence),
    "native global": _megatrons("global_aux_loss", _switch),
    "native z": Kind(_z, {"moe_z_loss_coeff": 1.0, **FLOAT64})}


def _by_hand(kind: Kind) -> Tensor:
    """Gradient of tokens * loss by the router's weights, all tokens on one rank, float64."""
    case = Case()
    weight_ED = draw(case).router.double().requires_grad_()
    # the layer's inputs of the one data-parallel rank
    g = torch.Generator().manual_seed(100)
    x_SBD = torch.randn(SEQUENCE, BATCH, weight_ED.shape[1], generator=g).double()
    logits_SBE = x_SBD @ weight_ED.t()
    best_SBK = logits_SBE.topk(2, dim=2).indices
    chosen_SBE = torch.zeros_like(logits_SBE).scatter(2, best_SBK, 1.0)
    loss = kind.formula(logits_SBE.softmax(2), chosen_SBE, logits_SBE)
    return torch.autograd.grad(SEQUENCE * BATCH * loss, weight_ED)[0].float()


def _gradient(case: Case, kind: Kind, by_token: bool = True) -> Tensor:
    """Gradient of the loss alone by the router's weights, as Megatron has it before it divides by
    tokens, summed over the world.
    """
    case = replace(case, native={**case.native, **kind.native,
                                 "calculate_per_token_loss": by_token})
    layer = build(case, True, kind.settings)
    x, _, padding = batch(case)
    torch.manual_seed(7)  # noise
    (layer(x.requires_grad_(), padding_mask=padding)[0] * 0).sum().backward()
    return whole_gradients(layer, case).router


def _gradients(cases: dict[str, Case], kinds: dict[str, Kind]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for place, case in cases.items():
        initialise_parallel(case)
        found[place] = {name: _gradient(case, kind) for name, kind in kinds.items()}
    return found


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
PLACES = {
    1: {"alone": Case(), "recomputed": Case(native=RECOMPUTED)},
    2: {"TP2": Case(tp=2), "TP2, sequence parallel": Case(tp=2, sequence_parallel=True),
        "CP2": Case(cp=2), "ETP2": Case(tp=2, etp=2, sequence_parallel=True, native=RECOMPUTED)},
    4: {"TP2 CP2": Case(tp=2, cp=2, ep=2, sequence_parallel=True, native=RECOMPUTED),
        "TP2 CP2, not sequence parallel": Case(tp=2, cp=2), "CP4": Case(cp=4)},
}


def _equal(found: list[dict[str, dict[str, Tensor]]], want: dict[str, Tensor]) -> None:
    for place in found[0]:
        for name, value in want.items():
            assert value.abs().max() > 0.01
            torch.testing.assert_close(found[0][place][name], value, rtol=2e-5, atol=2e-5,
                                       msg=lambda text, at=(place, name): f"{at}: {text}")


@pytest.mark.parametrize("world", PLACES)
def test_losses_count_once_for_every_token(world: int) -> None:
    kinds = {**OURS, **NATIVE}
    found = on_ranks(world, _gradients, PLACES[world], kinds, timeout_s=240)
    _equal(found, {name: _by_hand(kind) for name, kind in kinds.items()})


def test_ranks_with_the_same_tokens_count_them_once() -> None:
    """PPMoE, and Parm, which may split them."""
    for world, case in ((2, Case(tp=2, etp=2)), (4, Case(tp=2, etp=2, cp=2))):
        for settings in ({"dispatch.name": "index_slice"},
                         {"parallel.replicas": 2, "parallel.schedule": "s1"}):
            kinds = {name: replace(kind, settings={**kind.settings, **settings})
                     for name, kind in OURS.items()}
            found = on_ranks(world, _gradients, {str(settings): case}, kinds)
            _equal(found, {name: _by_hand(kind) for name, kind in OURS.items()})


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_padding_is_not_counted(world: int) -> None:
    """As many tokens as are real, and as on one rank, though ranks have unequal numbers of them."""
    kinds, padded = {**OURS, **NATIVE}, {"padding": True}
    needs_padding_mask(Case(padding=True))
    [alone] = on_ranks(1, _gradients, {"alone": Case(**padded)}, kinds)
    cases = {name: replace(case, **padded) for name, case in PLACES[world].items()}
    _equal(on_ranks(world, _gradients, cases, kinds, timeout_s=240), alone["alone"])


NEEDS = {"load_importance": {"router.noise": 1.0}, "tutel_load_importance": {"router.noise": 1.0},
         "noisy_load": {"router.name": "noisy_topk"},
         "sam_alignment": {"router.name": "sam", "router.groups": 2}}


def _every_loss(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    initialise_parallel(case)
    found = {}
    for name in losses.names():
        kind = Kind(None, settings={"losses": {name: 1.0}, **NEEDS.get(name, {})})
        found[name] = _gradient(case, kind, False), _gradient(case, kind)
    return found


@pytest.mark.parametrize("case", [Case(tp=2), Case(cp=2)], ids=["TP2", "CP2"])
def test_every_registered_loss_is_weighed_by_all_tokens(case: Case) -> None:
    for name, (plain, by_token) in on_ranks(2, _every_loss, case)[0].items():
        assert plain.abs().max() > 1e-5, name
        torch.testing.assert_close(by_token, SEQUENCE * BATCH * plain, rtol=1e-5, atol=1e-5)


NEWEST = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1,
          "calculate_per_token_loss": True}


@pytest.mark.skipif(VERSION < (0, 19), reason="Megatron's own layer is right from 0.19 on")
@pytest.mark.parametrize("case", [Case(tp=2, sequence_parallel=True, native=NEWEST),
                                  Case(cp=2, native=NEWEST)], ids=["TP2", "CP2"])
def test_equals_native(case: Case) -> None:
    results = on_ranks(2, compare, case)
    assert len(results[0]) >= 5 and max(max(found.values()) for found in results) < 2e-5, results


FLAGS = [*MODEL, "--calculate-per-token-loss", "--moe-aux-loss-coeff", "2", "--moe-z-loss-coeff",
         "0.5", "--optimizer", "sgd", "--sgd-momentum", "0"]


def _steps(argv: list[str]) -> tuple[float, float]:
    record = trained(argv)
    return record["lm_loss"], record["grad_norm"]


@pytest.mark.parametrize("router", [[], ["--moe-router-dtype", "fp64"]], ids=["ours", "native"])
def test_steps_over_stages_and_ranks_equal_those_of_one(router: list[str], data: str,
                                                        tmp_path: Path) -> None:
    """Pipeline stages, sequence parallelism and recomputation at once, from the same weights to the
    optimizer's step and the next one's loss.
    """
    argv = [*FLAGS, *router, "--data-path", data]
    on_ranks(1, _steps, [*argv, "--train-iters", "1", "--save", str(tmp_path)])
    argv = [*argv, "--train-iters", "3", "--load", str(tmp_path)]
    [want] = on_ranks(1, _steps, argv)
    for rank in on_ranks(4, _steps, [*argv, *TP2, *PP2, *RECOMPUTE]):
        assert rank == pytest.approx(want, rel=1e-4)
