"""Adapters on frozen experts that are stored as codes: outputs, gradients and one step of SGD of a
dense reference on the decoded weights, in every format and layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, run_simulated
from moe_plugin.experts.lora import ADAPTER_AXIS
from moe_plugin.hosts.plain.adapters import add_lora, freeze_experts
from moe_plugin.kernels.frozen import FROZEN_FORMATS, FrozenWeight, quantized
from tests.exactness.harness import config_of, load
from tests.exactness.spills import planned, random_planner
from tests.exactness.test_lora import (
    ALPHA,
    RANK,
    gradients,
    merged,
    same,
    set_factors,
    whole_factors,
)
from tests.oracle import Case, dense, direction_of, make_inputs, make_parameters, objective

pytestmark = pytest.mark.fast
STEP = 1e-3


def cell(world: int, experts: int, **changes: Any) -> tuple[Case, dict[str, Any]]:
    own = {name: changes.pop(name) for name in list(changes) if "__" not in name}
    own = {"kind": "gated_ffn", "top_k": min(2, experts), "width": 64, "hidden": 64, **own}
    return Case(world, experts, tokens=[5, 0, 4, 3][:world], **own), changes


AGAIN = {"experts__recompute_activation": True}
CELLS = {
    "alone": cell(1, 4), "alone, recomputed": cell(1, 4, **AGAIN),
    "alone, plain": cell(1, 4, kind="ffn", bias=False),
    "alone, bounded": cell(1, 4, dispatch__name="bounded"),
    "two": cell(2, 4), "two, recomputed": cell(2, 4, **AGAIN),
    "two, gathered": cell(2, 4, parallel__r=0), "two, pieces": cell(2, 4, parallel__d=2),
    "two, once": cell(2, 4, dispatch__send="ranks"),
    "two, lent": cell(2, 4, skew=2.0, parallel__spill="least_loaded"),
    "two, bounded": cell(2, 4, dispatch__name="bounded", dispatch__max_rows_factor=4.0),
    "two, shards": cell(2, 1, hidden=256),
    "four": cell(4, 4), "four, recomputed": cell(4, 4, **AGAIN),
    "four, shards": cell(4, 2, hidden=256), "four, shards, recomputed": cell(
        4, 2, hidden=256, **AGAIN),
    "four, shards, gathered": cell(4, 2, hidden=256, parallel__r=0),
    "four, shards, lent": cell(4, 2, hidden=256, skew=2.0, parallel__spill="least_loaded"),
}
UNSPLIT = ("nf4_double", "int8")  # formats of whole experts


def decoded(p: dict[str, Tensor], format: str) -> dict[str, Tensor]:
    """The weights that whole experts have after rounding."""
    made = dict(p)
    for name in ("w_in", "w_gate", "w_out"):
        for e, w in enumerate(p[name]):
            weight = FrozenWeight(format, tuple(part[None] for part in quantized(w.T, format)),
                                  torch.float64)
            made[name] = made[name].clone()
            made[name][e] = weight.decoded(0, slice(0, w.shape[1])).T.double()
    return made


def run(case: Case, comm: Comm, changes: dict[str, Any], factors: dict[str, Tensor],
        format: str, through: bool) -> dict[str, Tensor]:
    """Two forward passes of a rank, with a step of SGD between them."""
    layer = MoELayer(config_of(case, **changes), comm, dtype=torch.float64)
    xs, masks = make_inputs(case)
    load(layer, make_parameters(case), dataclasses.replace(case, world=comm.size))
    freeze_experts(layer, format)
    add_lora(layer, rank=RANK, alpha=ALPHA, use_dora="lora_m_out_LD" in factors)
    adapters = set_factors(layer, factors)
    x = xs[comm.rank].clone().requires_grad_()
    out = checkpoint(layer, x, use_reentrant=False) if through else layer(x)
    objective(out.output, out.losses, comm.rank, direction_of(out.output, comm.rank)).backward()
    found = {"output": out.output.detach(), "input": x.grad}
    for name, value in layer.named_parameters():
        assert (value.grad is None) != ("lora" in name), name
    found |= {name: value.grad.clone() for name, value in adapters.items()}
    torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=STEP).step()
    with torch.no_grad():
        found["stepped"] = layer(x).output
    return found


def compare(name: str, format: str, dora: bool = False, through: bool = False) -> None:
    case, changes = CELLS[name]
    p = decoded(make_parameters(case), format)
    factors = whole_factors(case, p, dora)
    scales = [ALPHA / RANK] * case.experts
    xs, masks = make_inputs(case)
    used = dataclasses.replace(case, factor=None)
    answer = dense(used, merged(p, factors, scales), xs, masks)
    want = gradients(answer, p, factors, scales)
    stepped = {key: value - STEP * want[key] for key, value in factors.items()}
    after = dense(used, merged(p, stepped, scales), xs, masks).outputs
    with planned(random_planner(3)) as plans:
        results = run_simulated(case.world, lambda comm: run(case, comm, changes, factors, format,
                                                             through))
    assert any(plan.loans for plan in plans) or "lent" not in name

    for rank, found in enumerate(results):
        same(found["output"], answer.outputs[rank], "output")
        same(found["input"], answer.input_grads[rank], "gradient of the input")
        same(found["stepped"], after[rank], "output after a step")
        shards = max(1, case.world // case.experts)
        local = case.experts * shards // case.world
        first, shard = rank // shards * local, rank % shards
        for key, value in want.items():
            part = value[first:first + local].chunk(shards, ADAPTER_AXIS[key])[shard]
            same(found[key], part, f"gradient of {key} on rank {rank}")


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("format", FROZEN_FORMATS)
def test_layouts(format: str, name: str) -> None:
    if "shards" in name and format in UNSPLIT:
        with pytest.raises(ValueError, match=r"format=\w+ cannot store w_\w+, which has 2 shards"
                           ".*Use the format nf4 or mxfp4 or fp8"):
            compare(name, format)
    else:
        compare(name, format)


@pytest.mark.parametrize("name", ["alone, recomputed", "two", "two, gathered", "two, lent",
                                  "four, shards"])
def test_dora(name: str) -> None:
    compare(name, "nf4", dora=True)


@pytest.mark.parametrize("name", ["alone", "two, gathered", "four, shards"])
def test_checkpointed_layers(name: str) -> None:
    compare(name, "mxfp4", through=True)
