"""LoRA and DoRA on experts: outputs and gradients of the dense reference with merged weights, in
every layout.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, run_simulated
from moe_plugin.experts.lora import ADAPTER_AXIS
from moe_plugin.hosts.plain.adapters import add_lora, merge_lora, unmerge_lora
from tests.exactness.harness import config_of, load
from tests.exactness.spills import planned, random_planner
from tests.oracle import Answer, Case, dense, direction_of, make_inputs, make_parameters

pytestmark = pytest.mark.fast

RANK, ALPHA = 3, 5.0
# a, b and m of the weights of the reference
FACTORS = {"w_in": ("lora_a_in_LDR", "lora_b_in_LRF", "lora_m_in_LF"),
           "w_gate": ("lora_a_in_LDR", "lora_b_gate_LRF", "lora_m_gate_LF"),
           "w_out": ("lora_a_out_LFR", "lora_b_out_LRD", "lora_m_out_LD")}


def cell(world: int, experts: int, **changes: Any) -> tuple[Case, dict[str, Any]]:
    own = {name: changes.pop(name) for name in list(changes) if "__" not in name}
    own = {"kind": "gated_ffn", "top_k": min(2, experts), **own}
    return Case(world, experts, tokens=[5, 0, 7, 3][:world], **own), changes


CELLS = {
    "alone": cell(1, 4), "alone, plain experts": cell(1, 4, kind="ffn", bias=False),
    **{f"alone, {how}": cell(1, 4, experts__compute=how)
       for how in ("loop", "batched", "grouped", "fused")},
    "alone, recomputed": cell(1, 4, experts__recompute_activation=True),
    "alone, weights first": cell(1, 4, weights_first=True),
    "alone, latent": cell(1, 4, latent=4), "alone, bounded": cell(1, 4, dispatch__name="bounded"),
    "two": cell(2, 4), "two, plain": cell(2, 2, kind="ffn"),
    "two, gathered": cell(2, 4, parallel__r=0),
    "two, pieces": cell(2, 4, parallel__d=2), "two, once": cell(2, 4, dispatch__send="ranks"),
    "two, padded": cell(2, 4, factor=2.0, dispatch__name="padded", dispatch__capacity_factor=2.0),
    "two, bounded": cell(2, 4, dispatch__name="bounded", dispatch__max_rows_factor=4.0),
    "two, lent": cell(2, 4, skew=2.0, parallel__spill="least_loaded"),
    "two, a token's expert on all": cell(2, 1),
    "four": cell(4, 4), "four, two shards": cell(4, 2),
    "four, two shards, one at a time": cell(4, 2, parallel__r=1),
    "four, two shards, gathered": cell(4, 2, parallel__r=0),
    "four, shards of several": cell(4, 4, shards=2),
    "four, shards of several, pieces": cell(4, 4, shards=2, parallel__d=2),
    "four, four shards": cell(4, 1), "four, four shards, two gathered": cell(4, 1, parallel__r=2),
    "four, four shards, lent": cell(4, 1, skew=2.0, parallel__spill="least_loaded"),
}


def whole_factors(case: Case, p: dict[str, Tensor], dora: bool) -> dict[str, Tensor]:
    """Values of all experts' adapters; lengths are not those that there are."""
    g, made = torch.Generator().manual_seed(9), {}
    for name, (a, b, m) in FACTORS.items():
        if name == "w_gate" and case.kind == "ffn":
            continue
        e, inner, outer = p[name].shape
        made.setdefault(a, torch.randn(e, inner, RANK, generator=g, dtype=torch.float64) / 2)
        made[b] = torch.randn(e, RANK, outer, generator=g, dtype=torch.float64) / 2
        if dora:
            made[m] = torch.rand(e, outer, generator=g, dtype=torch.float64) + 0.5
    return made


def part_of(layer: MoELayer, name: str, whole: Tensor) -> Tensor:
    place = layer.placement
    mine = whole[place.first_expert:place.first_expert + place.local]
    return mine.chunk(place.shards, ADAPTER_AXIS[name])[place.shard]


def set_factors(layer: MoELayer, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write this rank's part of the factors; returns the layer's adapters."""
    adapters = {name: value for name, value in layer.experts.named_parameters() if "lora" in name}
    assert adapters.keys() == factors.keys()
    with torch.no_grad():
        for name, value in adapters.items():
            value.copy_(part_of(layer, name, factors[name]))
    return adapters


def same(got: Tensor, wanted: Tensor, what: str) -> None:
    atol = 1e-10 * max(1.0, float(wanted.abs().max()) if wanted.numel() else 1.0)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=atol, msg=f"{what}: {{}}".format)


def merged(p: dict[str, Tensor], factors: dict[str, Tensor], scales: list[float]
           ) -> dict[str, Tensor]:
    """The weights that experts compute with, one expert and one column after another."""
    made = dict(p)
    for name, (a, b, m) in FACTORS.items():
        if b not in factors:
            continue
        made[name] = p[name].clone()
        for e, scale in enumerate(scales):
            made[name][e] += scale * factors[a][e] @ factors[b][e]
            for column in range(made[name].shape[2]) if m in factors and scale else ():
                w = made[name][e, :, column]
                w *= factors[m][e, column] / math.sqrt(sum(float(x)**2 for x in w))
    return made


def gradients(answer: Answer, p: dict[str, Tensor], factors: dict[str, Tensor],
              scales: list[float]) -> dict[str, Tensor]:
    """By the chain rule, from those of the merged weights; lengths of sums are constants."""
    made = {name: torch.zeros_like(value) for name, value in factors.items()}
    for name, (a, b, m) in FACTORS.items():
        for e, scale in enumerate(scales if b in factors else ()):
            grad = answer.grads[name][e]
            if m in factors and scale:
                v = p[name][e] + scale * factors[a][e] @ factors[b][e]
                made[m][e] = (grad * v).sum(0) / v.norm(dim=0)
                grad = grad * factors[m][e] / v.norm(dim=0)
            made[a][e] += scale * grad @ factors[b][e].T
            made[b][e] += scale * factors[a][e].T @ grad
    return made


def run(case: Case, comm: Comm, changes: dict[str, Any], factors: dict[str, Tensor],
        experts: list[int]) -> dict[str, Tensor]:
    layer = MoELayer(config_of(case, **changes), comm, dtype=torch.float64)
    p, (xs, masks) = make_parameters(case), make_inputs(case)
    load(layer, p, dataclasses.replace(case, world=comm.size))
    before = layer(xs[comm.rank], masks[comm.rank]).output
    add_lora(layer, rank=RANK, alpha=ALPHA, experts=experts, use_dora="lora_m_out_LD" in factors)
    x = xs[comm.rank].clone().requires_grad_()
    torch.testing.assert_close(layer(x).output, before, rtol=1e-10, atol=1e-12)
    adapters = set_factors(layer, factors)
    out = layer(x)
    ((out.output * direction_of(out.output, comm.rank)).sum()
     + (out.output**2).sum() / 2).backward()
    found = {"output": out.output.detach(), "input": x.grad}
    for name, value in layer.named_parameters():
        assert (value.grad is None) != ("lora" in name), name
    found |= {name: value.grad.clone() for name, value in adapters.items()}
    parts = {name: part_of(layer, name, value) for name, value in factors.items()}
    merge_lora(layer, keep=True)
    found["merged"] = layer(x.detach()).output
    unmerge_lora(layer)
    found["unmerged"] = layer(x.detach()).output
    merge_lora(layer)
    found["gone"] = layer(x.detach()).output
    assert layer.experts.adapters is None and all(p.requires_grad for p in
                                                  layer.experts.parameters())
    return found | {f"part {name}": value for name, value in parts.items()}


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", CELLS)
def test_layouts(name: str, dora: bool) -> None:
    case, changes = CELLS[name]
    p = make_parameters(case)
    factors = whole_factors(case, p, dora)
    experts = list(range(max(1, case.experts - 1)))  # the last of several has no adapter
    scales = [ALPHA / RANK if e in experts else 0.0 for e in range(case.experts)]
    xs, masks = make_inputs(case)
    answer = dense(dataclasses.replace(case, factor=None), merged(p, factors, scales), xs, masks)
    want = gradients(answer, p, factors, scales)
    with planned(random_planner(3)) as plans:
        results = run_simulated(case.world,
                                lambda comm: run(case, comm, changes, factors, experts))
    assert any(plan.loans for plan in plans) or "lent" not in name

    for rank, found in enumerate(results):
        same(found["output"], answer.outputs[rank], "output")
        for key in ("merged", "unmerged", "gone"):
            same(found[key], answer.outputs[rank], key)
        shards = case.shards or max(1, case.world // case.experts)
        local = case.experts * shards // case.world
        first, shard = rank // shards * local, rank % shards
        for key, value in want.items():
            part = value[first:first + local].chunk(shards, ADAPTER_AXIS[key])[shard]
            same(found[key], part, f"gradient of {key} on rank {rank}")
