"""Measure all implementations of each operation, and compare them with a reference and with a lower
bound on the time.

The lower bound is the larger of two times: the bytes divided by the copy bandwidth, and the FLOPs
divided by the GEMM rate. Both the copy bandwidth and the GEMM rate are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_plugin.dispatch.rows import exact_rows
from moe_plugin.kernels import RowGroups, kernels, quantize_fp8
from moe_plugin.kernels.fp8 import BLOCK, quantize_weights_fp8
from moe_plugin.kernels.frozen import FROZEN_FORMATS, FrozenWeight
from moe_plugin.kernels.router import Rule
from moe_plugin.kernels.scores import SOFTMAX
from moe_plugin.utils.messages import short
from scripts.bench.measure import interleaved, versions
from scripts.bench.problem import Data, Problem, make_data
from scripts.bench.report import page


@dataclass(frozen=True)
class Work:
    """One call of an operation, with its number of FLOPs and its minimum number of bytes. Each
    input and output is counted once.
    """

    operation: str
    args: tuple[Any, ...]
    bytes: int
    flops: int = 0


def parts(found: Mapping[str, Any]) -> list[str]:
    """Return the sections of a page from a result of `run`.

    Each row shows one implementation of an operation; * marks the one that the package chooses.
    """
    rows = [{**r, **{name: r[f"{name}_ms"] / 1e3 for name in ("median", "min", "bound")},
             "marked": r["implementation"] + " *" * r["chosen"]} for r in found["results"]]
    return [
        *page(__name__, found, label=Problem(**found["problem"]).label(), rows=rows),
        *(f"* {name} was not measured: {why}" for name, why in found.get("refused", {}).items())]


def run(problem: Problem, rounds: int = 15) -> dict[str, Any]:
    """Measure all implementations of every operation that can run on this machine.

    `refused` contains the reason for each operation that was not measured, and for each operation
    without a Triton measurement on a GPU.
    """
    device = torch.device(problem.device)
    copy_s, gemm_flops = _ceilings(problem, device, rounds)
    results: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    works = work_list(problem)
    name = "all"
    while True:  # an operation that fails does not prevent the measurement of the others
        try:
            work = next(works, None)
            if work is None:
                break
            name = work.operation
            bound = max(work.bytes * copy_s, work.flops / gemm_flops)
            results += _measured(work, device, rounds, bound, refused)
        except Exception as error:  # raised by a compiler or by the GPU
            if device.type == "cpu":
                raise
            refused[name] = short(f"{type(error).__name__}: {error}", 200)
    return {"problem": asdict(problem), "copy_gbytes_per_s": 1e-9 / copy_s,
            "gemm_tflops": gemm_flops / 1e12, "results": results, "refused": refused,
            "threads": torch.get_num_threads(), "versions": versions(problem.device)}


def _measured(work: Work, device: torch.device, rounds: int, bound: float,
              refused: dict[str, str]) -> list[dict[str, Any]]:
    kernel = kernels.get(work.operation)
    why = {name: kernel.why_not(name, *work.args) for name in kernel.names()}
    if device.type != "cpu" and why.get("triton"):
        refused[f"{work.operation} in Triton"] = str(why["triton"])
    names = [name for name, reason in why.items() if reason is None]
    calls = [partial(kernel.implementation(name), *work.args) for name in names]
    return [{
        "operation": work.operation, "implementation": name,
        "chosen": name == kernel.choose(*work.args), "median_ms": times.median * 1e3,
        "min_ms": times.best * 1e3, "bound_ms": bound * 1e3, "share_of_bound": bound / times.median,
        "gbytes_per_s": work.bytes / times.median / 1e9,
        "tflops": work.flops / times.median / 1e12}
        for name, times in zip(names, interleaved(calls, device, rounds), strict=True)]


def _ceilings(problem: Problem, device: torch.device, rounds: int) -> tuple[float, float]:
    """Return (seconds per copied byte, FLOP/s of a large matmul), both measured on this device."""
    numel = (1 << 31 if device.type == "cuda" else 1 << 27) // 4
    source, target = torch.randn(numel, device=device), torch.empty(numel, device=device)
    side = 8192 if device.type == "cuda" else 1024
    a = torch.randn(side, side, device=device).to(problem.torch_dtype)
    out = torch.empty_like(a)
    copy, gemm = interleaved([lambda: target.copy_(source), lambda: torch.mm(a, a, out=out)],
                             device, rounds)
    return copy.median / (8 * numel), 2 * side**3 / gemm.median


def work_list(problem: Problem) -> Iterator[Work]:
    """Yield every operation with the sizes used in one layer."""
    data = make_data(problem)
    logits_TE = data.x_TD.float() @ data.router_ED.float().t()
    mask_T = torch.ones(problem.tokens, dtype=torch.bool, device=problem.device)
    rule = Rule(problem.top_k, True, SOFTMAX)
    routed = kernels.get("route_top_k").implementation("torch")(logits_TE, mask_T, None, None, rule)
    plan = exact_rows(routed[0], routed[1], problem.experts)
    yield from _routing(problem, rule, logits_TE, mask_T, routed)
    rows_RD = data.x_TD.repeat_interleave(problem.top_k, 0)
    yield from _rows(problem, data, rows_RD, plan)
    yield from _products(problem, data, rows_RD, plan)


def _size(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _routing(p: Problem, rule: Rule, logits_TE: Tensor, mask_T: Tensor,
             routed: tuple[Tensor, ...]) -> Iterator[Work]:
    ids, weights, lse, importance, z, _ = routed
    yield Work("route_top_k", (logits_TE, mask_T, None, None, rule),
               _size(logits_TE, mask_T, ids, weights, lse))
    yield Work("route_top_k_backward",
               (logits_TE, mask_T, ids, weights, lse, weights, importance, z, rule, True),
               2 * _size(logits_TE) + _size(ids, weights, weights, lse))
    yield Work("running_count", (ids.reshape(-1), p.experts), 2 * _size(ids))


def _rows(p: Problem, data: Data, rows_RD: Tensor, plan: Any) -> Iterator[Work]:
    position, source = plan.position_TK, plan.source_R
    yield Work("take_rows", (data.x_TD, source, p.top_k, None), _size(data.x_TD, source, rows_RD))
    yield Work("sum_rows", (rows_RD, position, plan.weights_TK),
               _size(rows_RD, position, plan.weights_TK, data.x_TD))
    yield Work("dot_rows", (data.grad_TD, rows_RD, position),
               _size(data.grad_TD, rows_RD, position, plan.weights_TK))
    if p.rows % 8 == 0:
        yield Work("transpose_chunks", (rows_RD, 4, 2), 2 * _size(rows_RD))
    scales = p.rows * -(-p.model_dim // 128) * 4
    yield Work("quantize_fp8", (rows_RD, 128), _size(rows_RD) + rows_RD.numel() + scales)


def _products(p: Problem, data: Data, rows_RD: Tensor, plan: Any) -> Iterator[Work]:
    groups, token = RowGroups(plan.counts, rows_RD.device), plan.token_R
    h_RF = torch.randn(p.rows, p.hidden_dim, device=p.device).to(p.torch_dtype)
    gate, act = (h_RF.flip(0), "silu") if p.gated else (None, "gelu")
    flops, weights = 2 * p.rows * p.model_dim * p.hidden_dim, _size(data.w_in_LDF)
    scale = torch.rand(p.rows, device=p.device)
    if p.gated:
        yield Work("expert_matmul_gated", (data.x_TD, groups, data.w_in_LDF, None, data.w_gate_LDF,
                                           None, token, act, "ieee"),
                   _size(data.x_TD, h_RF, h_RF, h_RF) + 2 * weights, 2 * flops)
        transposed = [w.transpose(1, 2) for w in (data.w_in_LDF, data.w_gate_LDF)]
        yield Work("expert_matmul_sum", (h_RF, gate, groups, *transposed, "ieee"),
                   _size(h_RF, gate, rows_RD) + 2 * weights, 2 * flops)
    else:
        yield Work("expert_matmul_act", (data.x_TD, groups, data.w_in_LDF, None, token, act,
                                         "ieee"), _size(data.x_TD, h_RF, h_RF) + weights, flops)
    yield Work("expert_matmul", (h_RF, groups, data.w_out_LFD, None, None, "ieee"),
               _size(h_RF, rows_RD) + weights, flops)
    yield Work("expert_matmul_act_backward",
               (data.grad_TD, groups, data.w_out_LFD, h_RF, gate, scale, token, act, "ieee"),
               _size(data.grad_TD, h_RF, h_RF, h_RF, gate, gate) + weights, flops)
    yield Work("expert_weight_grad", (data.x_TD, h_RF, groups, token, None, "ieee"),
               _size(data.x_TD, h_RF) + weights, flops)
    main_grad_LDF = torch.zeros(data.w_in_LDF.shape, device=p.device)
    yield Work("expert_weight_grad_add",
               (data.x_TD, h_RF, groups, token, None, "ieee", main_grad_LDF),
               _size(data.x_TD, h_RF) + 2 * _size(main_grad_LDF), flops)
    yield Work("expert_bias_grad", (h_RF, groups, None, None), _size(h_RF))
    yield Work("tile_table", (groups.lengths_L, 128, groups.total, 0),
               8 * groups.number + 8 * (groups.total // 128 + groups.number))
    yield from _fp8(p, data, groups, token, h_RF)
    if p.model_dim % 64 == 0:
        codes, scales = (torch.full((p.experts, *shape), 63, dtype=torch.uint8, device=p.device)
                         for shape in FROZEN_FORMATS["nf4"].shapes(p.model_dim, p.hidden_dim))
        yield Work("expert_matmul_frozen", (
            rows_RD, groups, FrozenWeight("nf4", (codes, scales), p.torch_dtype), False),
            _size(rows_RD, h_RF, codes, scales), flops)


def _fp8(p: Problem, data: Data, groups: RowGroups, token_R: Tensor,
         h_RF: Tensor) -> Iterator[Work]:
    yield Work("quantize_weights_fp8", (data.w_in_LDF,),
               _size(data.w_in_LDF) + data.w_in_LDF.numel())
    rows, weights = quantize_fp8(data.x_TD, BLOCK), quantize_weights_fp8(data.w_in_LDF)
    yield Work("expert_matmul_fp8",
               (*rows, groups, *weights, None, token_R, p.torch_dtype),
               _size(*rows, *weights, h_RF), 2 * p.rows * p.model_dim * p.hidden_dim)
