"""Adapters on frozen experts in Megatron: gradients of whole models after Megatron's reduction,
against Megatron's own layers with the decoded weights.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_plugin.kernels.frozen import FROZEN_AXIS, FROZEN_FORMATS, PARTS, FrozenWeight, quantized
from tests.hosts.megatron import whole as models
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.whole import Whole, whole

WIDTH, HIDDEN, RANK, ALPHA = 64, 128, 3, 6.0
SIZES = {"hidden_size": WIDTH, "moe_ffn_hidden_size": HIDDEN, "moe_aux_loss_coeff": 0.1,
         "moe_router_load_balancing_type": "aux_loss"}
SHAPES = {"w_in_LDF": (WIDTH, HIDDEN), "w_out_LFD": (HIDDEN, WIDTH)}
# an expert's matrix by its name in `whole`, and the adapter on it
MATRICES = {"linear_fc1": ("w_in_LDF", "lora_a_in_LDR", "lora_b_in_LRF"),
            "linear_fc2": ("w_out_LFD", "lora_a_out_LFR", "lora_b_out_LRD")}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
TWO = {
    "DP2": Whole(), "EP2": Whole(ep=2), "PP2": Whole(pp=2), "CP2 EP2": Whole(cp=2, ep=2),
    "TP2": Whole(tp=2), "TP2 EP2": Whole(tp=2, ep=2, sequence_parallel=True),
    "EP2, recomputed": Whole(ep=2, native=MOE),
    "EP2, overlapped": Whole(ep=2, ddp={"overlap_grad_reduce": True}),
    "EP2, means": Whole(ep=2, ddp={"average_in_collective": True}),
}
FOUR = {"EP4": Whole(ep=4), "EP2 DP2": Whole(ep=2), "PP2 EP2": Whole(pp=2, ep=2),
        "TP2 EP4": Whole(tp=2, ep=4, sequence_parallel=True)}


def _matrix(stem: str, fc: str) -> Tensor:
    return models.draw(f"{stem}.{fc}", SHAPES[MATRICES[fc][0]])


def _factors(stem: str, fc: str) -> tuple[Tensor, Tensor]:
    """The adapter [I, R], [R, O] of an expert's matrix."""
    (inner, outer), (_, a, b) = SHAPES[MATRICES[fc][0]], MATRICES[fc]
    return models.draw(f"{stem}.{a}", (inner, RANK)), models.draw(f"{stem}.{b}", (RANK, outer))


def _merged(format: str) -> dict[str, Tensor]:
    """All experts' matrices, decoded, with their adapters."""
    made = {}
    for layer in range(4):
        for expert in range(4):
            stem = f"decoder.layers.{layer}.mlp.{expert}"
            for fc in MATRICES:
                w = _matrix(stem, fc)
                if format != "none":
                    parts = tuple(part[None] for part in quantized(w.T, format))
                    w = FrozenWeight(format, parts, w.dtype).decoded(0, slice(0, w.shape[1])).T
                a, b = _factors(stem, fc)
                made[f"{stem}.{fc}"] = w + ALPHA / RANK * a @ b
    return made


def _reference(format: str) -> dict[str, Any]:
    """Megatron's own layers with the merged matrices, on data-parallel ranks."""
    merged, draw = _merged(format), models.draw
    with mock.patch.object(models, "draw", lambda name, shape: (
            merged[name] if name in merged else draw(name, shape))):
        return models.step(Whole(native=SIZES), None)


def _wanted(format: str, ranks: int) -> dict[str, Tensor]:
    """Gradients of the adapters, from those of the merged matrices, and of all other parameters."""
    found = whole(on_ranks(ranks, _reference, format))
    for name in [name for name in found if ".linear_fc" in name and ".mlp." in name]:
        stem, _, fc = name.rpartition(".")
        grad, (a, b), (_, a_name, b_name) = found.pop(name), _factors(stem, fc), MATRICES[fc]
        found[f"{stem}.{a_name}"] = ALPHA / RANK * grad @ b.T
        found[f"{stem}.{b_name}"] = ALPHA / RANK * a.T @ grad
    return found


def _fill(parameter: Any, name: str, part: tuple[str, int], format: str, fill: Any) -> None:
    stem, _, rest = name.partition(".experts.")
    if rest not in FROZEN_AXIS:
        return fill(parameter, name, part)
    weight = next(weight for weight, parts in PARTS.items() if rest in parts)
    fc = next(fc for fc, (one, *_) in MATRICES.items() if one == weight)
    for slot, value in enumerate(parameter.data):
        made = quantized(_matrix(f"{stem}.{part[1] * len(parameter) + slot}", fc).T, format)
        value.copy_(made[PARTS[weight].index(rest)])


def _step(every: list[Whole], format: str) -> list[dict[str, Any]]:
    fill = models.fill
    settings = {"finetune.frozen_experts": format, "finetune.lora_rank": RANK,
                "finetune.lora_alpha": ALPHA}
    with mock.patch.object(models, "fill", lambda *given: _fill(*given, format, fill)):
        return [models.step(case, settings) for case in every]


def _compare(world: int, cases: dict[str, Whole], format: str) -> None:
    every = [Whole(**{**vars(case), "native": {**SIZES, **case.native}}) for case in cases.values()]
    replicas = [world // (case.tp * case.pp * case.cp) for case in every]
    ranks, by_size = on_ranks(world, _step, every, format), {
        size: _wanted(format, size) for size in {*replicas}}
    for number, case in enumerate(cases):
        got, wanted = whole([rank[number] for rank in ranks]), by_size[replicas[number]]
        assert got.keys() == wanted.keys() and sum(".lora_" in name for name in got) == 4 * 4 * 4
        for name, value in wanted.items():
            limit = 2e-4 * float(value.abs().max())
            assert limit and float((got[name] - value).abs().max()) < limit, (case, name)


@pytest.mark.parametrize("format", [*FROZEN_FORMATS, "none"])
def test_gradients_of_two_ranks(format: str) -> None:
    _compare(2, TWO if format == "nf4" else {name: TWO[name] for name in ("DP2", "EP2")}, format)


def test_gradients_of_four_ranks() -> None:
    _compare(4, FOUR, "mxfp4")


def test_gradients_with_exchanges_behind_another_micro_batch() -> None:
    """In bf16, as Megatron demands, with an overlapped reduction of gradients."""
    overlap = {"overlap_moe_expert_parallel_comm": True, "moe_layer_freq": 1}
    cases = [Whole(ep=2, dtype=torch.bfloat16, native={**SIZES, **more},
                   ddp={"overlap_grad_reduce": True}) for more in (overlap, {})]
    ranks = on_ranks(2, _step, cases, "nf4")
    got, wanted = (whole([rank[number] for rank in ranks]) for number in (0, 1))
    assert got.keys() == wanted.keys() and any(".lora_b" in name for name in got)
    for name, value in wanted.items():
        difference = float((got[name] - value).norm() / value.norm())
        assert difference < 0.01, (name, difference)  # 0.0033 at most when it was written
