"""Adapters on frozen experts that are stored as codes: outputs, gradients and one step of SGD of a
dense reference on the decoded weights, in every format, layout and store.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
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

STEP = 1e-3


def cell(world: int, experts: int, alike: int = 1, **changes: Any
         ) -> tuple[Case, int, dict[str, Any]]:
    """A case, its number of ranks, of which `alike` have the same tokens, and changed settings."""
    own = {name: changes.pop(name) for name in list(changes) if "__" not in name}
    own = {"kind": "gated_ffn", "top_k": min(2, experts), "width": 64, "hidden": 64, **own}
    tokens = [5, 0, 4, 3][:world // alike]
    return Case(world // alike, experts, tokens=tokens, **own), world, changes


AGAIN = {"experts__recompute_activation": True}
PARM = {"dispatch__name": "parm_s2", "dispatch__capacity_factor": 2.0, "parallel__replicas": 2,
        "parallel__schedule": "s2"}
CELLS = {
    "alone": cell(1, 4), "alone, recomputed": cell(1, 4, **AGAIN),
    "alone, plain": cell(1, 4, kind="ffn", bias=False),
    "alone, bounded": cell(1, 4, dispatch__name="bounded"),
    "two": cell(2, 4), "two, recomputed": cell(2, 4, **AGAIN),
    "two, gathered": cell(2, 4, parallel__r=0), "two, pieces": cell(2, 4, parallel__d=2),
    "two, once": cell(2, 4, dispatch__send="ranks"),
    "two, lent": cell(2, 4, skew=2.0, parallel__spill="least_loaded"),
    "two, bounded": cell(2, 4, dispatch__name="bounded", dispatch__max_rows_factor=4.0),
    "two, padded": cell(2, 4, dispatch__name="padded", dispatch__capacity_factor=2.0),
    "two, gathered tokens": cell(2, 4, dispatch__name="all_gather"),
    "two, same tokens": cell(2, 4, alike=2, dispatch__name="index_slice"),
    "two, same tokens, slots": cell(2, 4, alike=2, **PARM),
    "two, shards": cell(2, 1, hidden=256), "two, shards of several": cell(
        2, 2, hidden=256, shards=2, parallel__d=2),
    "four": cell(4, 4), "four, recomputed": cell(4, 4, **AGAIN),
    "four, shards": cell(4, 2, hidden=256), "four, shards, recomputed": cell(
        4, 2, hidden=256, **AGAIN), "four, four shards": cell(4, 1, hidden=512),
    "four, shards, gathered": cell(4, 2, hidden=256, parallel__r=0),
    "four, shards, lent": cell(4, 2, hidden=256, skew=2.0, parallel__spill="least_loaded"),
}
# layouts that move weights between ranks do not exist for experts outside the device
STORED = [name for name in CELLS if not name.endswith(("gathered", "lent"))]


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
    tokens = comm.rank * case.world // comm.size
    load(layer, make_parameters(case), dataclasses.replace(case, world=comm.size))
    freeze_experts(layer, format)
    add_lora(layer, rank=RANK, alpha=ALPHA, use_dora="lora_m_out_LD" in factors)
    adapters = set_factors(layer, factors)
    x = xs[tokens].clone().requires_grad_()
    out = checkpoint(layer, x, use_reentrant=False) if through else layer(x)
    objective(out.output, out.losses, tokens, direction_of(out.output, tokens)).backward()
    found = {"output": out.output.detach(), "input": x.grad}
    for name, value in layer.named_parameters():
        assert (value.grad is None) != ("lora" in name), name
    found |= {name: value.grad.clone() for name, value in adapters.items()}
    torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=STEP).step()
    with torch.no_grad():
        found["stepped"] = layer(x).output
    return found


def compare(name: str, format: str, dora: bool = False, through: bool = False,
            **more: Any) -> None:
    case, world, changes = CELLS[name]
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
        results = run_simulated(world, lambda comm: run(case, comm, changes | more, factors,
                                                        format, through))
    assert any(plan.loans for plan in plans) or "lent" not in name

    for rank, found in enumerate(results):
        tokens = rank * case.world // world
        same(found["output"], answer.outputs[tokens], "output")
        same(found["input"], answer.input_grads[tokens], "gradient of the input")
        same(found["stepped"], after[tokens], "output after a step")
        shards = case.shards or max(1, world // case.experts)
        local = case.experts * shards // world
        first, shard = rank // shards * local, rank % shards
        for key, value in want.items():
            part = value[first:first + local].chunk(shards, ADAPTER_AXIS[key])[shard]
            same(found[key], part, f"gradient of {key} on rank {rank}")


@pytest.mark.fast
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("format", FROZEN_FORMATS)
def test_layouts(format: str, name: str) -> None:
    compare(name, format)


# every layout in every format; those that are fast have every pair of two of the three
@pytest.mark.parametrize(("name", "store", "format"), [
    pytest.param(name, store, format, marks=[pytest.mark.fast] * ((i + 2 * j + k) % 5 == 0))
    for i, name in enumerate(STORED) for j, store in enumerate(["host", "disk"])
    for k, format in enumerate(FROZEN_FORMATS)])
def test_stores(name: str, store: str, format: str, tmp_path: Path) -> None:
    """With room for one expert on the device, and on the disk with room for all of them."""
    case = CELLS[name][0]
    shapes = FROZEN_FORMATS[format].shapes
    expert = sum(math.prod(shape) for inner, outer, number in (
        (case.width, case.hidden, 2), (case.hidden, case.width, 1))
        for shape in shapes(inner, outer) * number)
    changes: dict[str, Any] = {"experts__cache": str(expert)}
    if store == "disk":
        changes = {"experts__store_path": str(tmp_path)}
    compare(name, format, experts__store=store, **changes)


@pytest.mark.fast
@pytest.mark.parametrize("store", ["device", "host", "disk"])
@pytest.mark.parametrize("name", ["alone, recomputed", "two", "two, gathered", "two, lent",
                                  "four, shards"])
def test_dora(name: str, store: str) -> None:
    if store == "device" or name in STORED:
        compare(name, "nf4", dora=True, experts__store=store)


@pytest.mark.fast
@pytest.mark.parametrize("store", ["device", "host", "disk"])
@pytest.mark.parametrize("name", ["alone", "two, gathered", "four, shards"])
def test_checkpointed_layers(name: str, store: str) -> None:
    if store == "device" or name in STORED:
        compare(name, "mxfp4", through=True, experts__store=store)


@pytest.mark.fast
@pytest.mark.parametrize("name", [name for name in CELLS if name not in STORED])
def test_layouts_that_move_weights_are_refused_outside_the_device(name: str) -> None:
    with pytest.raises(ValueError, match=r"experts.store=host cannot be used with parallel\."
                       "(r|spill)=.*or experts.store=device"):
        compare(name, "nf4", experts__store="host")
