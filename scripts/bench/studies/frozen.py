"""Measure one layer with frozen experts that are stored as codes, and LoRA adapters. Our layer is
compared with other libraries, with 16-bit weights, and with the least time that this machine needs.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.frozen import why_not, why_not_multiply
from moe_plugin.kernels.frozen import FROZEN_FORMATS
from scripts.bench.measure import interleaved
from scripts.bench.peers.base import route
from scripts.bench.peers.frozen import (
    RANK,  # noqa: F401 - named in the page
    FrozenProblem,
    Side,
    bitsandbytes,
    ktransformers,
    make_experts,
    ours,
    reference,
)
from scripts.bench.problem import Problem
from scripts.bench.report import columns, page
from scripts.bench.study import Option

TITLE = "Frozen experts stored as codes, on a CPU"
SHAPES = {"DeepSeek-V2-Lite": {"model_dim": 2048, "hidden_dim": 1408, "experts": 64, "top_k": 6},
          "Qwen3-30B-A3B": {"model_dim": 2048, "hidden_dim": 768, "experts": 128, "top_k": 8}}
BOUND = "bound of nf4"
CHECKED = 64  # tokens whose outputs and gradients are compared with a dense computation
OPTIONS = {
    "tokens": Option((8, 64, 1024), "numbers of tokens per call", quick=(8,)),
    "rounds": Option(5, "number of timed rounds", quick=1),
    "threads": Option(torch.get_num_threads(), "number of CPU threads", least=1),
}


def sides_of(experts: FrozenProblem) -> dict[str, tuple[str | None, Side]]:
    """Return the format and the function of each side whose packages are installed."""
    made: dict[str, tuple[str | None, Side]] = {
        f"ours, {format}": (format, ours(experts, format)) for format in FROZEN_FORMATS}
    if find_spec("bitsandbytes"):
        made["transformers and bitsandbytes, nf4"] = "nf4", bitsandbytes(experts)
    if find_spec("kt_kernel"):
        made |= {f"ktransformers, {format}": (format, ktransformers(experts, format))
                 for format in ("mxfp4", "fp8")}
    return made | {"ours, 16-bit weights": (None, ours(experts, None))}


def call(side: Side, x_TD: Tensor, backward: bool) -> tuple[Tensor, Tensor | None]:
    """Run one pass, or both. Return the output and the gradient of the tokens."""
    x_TD = x_TD.detach().requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        y_TD = side(x_TD)
        if backward:
            y_TD.backward(torch.ones_like(y_TD))
    return y_TD.detach(), x_TD.grad


def errors(experts: FrozenProblem, sides: dict[str, tuple[str | None, Side]], x_TD: Tensor
           ) -> dict[str, list[float]]:
    """Return the relative errors of each side's output and gradient, compared with a dense
    computation in float32 on the decoded codes.
    """
    wanted: dict[str | None, Any] = {
        format: call(partial(reference, experts, format), x_TD.float(), True)
        for format in {format for format, _ in sides.values()}}
    return {name: [float((got.float() - want).norm() / want.norm()) for got, want in zip(
        call(side, x_TD, True), wanted[format], strict=True)]
        for name, (format, side) in sides.items()}


def bound(experts: FrozenProblem, x_TD: Tensor, backward: bool, speed: dict[str, float]) -> float:
    """Return the least seconds: the FLOPs at the rate of a large matmul, or the bytes of nf4 codes
    of all used experts at the rate of a large sum.
    """
    p = experts.problem
    used = route(x_TD, experts.router_ED, p.top_k)[1].unique().numel()
    passes, bits = 1 + backward, 4 + 32 / 64
    values = p.weights / p.experts
    return max(passes * 2 * p.top_k * len(x_TD) * values / speed["flops"],
               passes * used * values * bits / 8 / speed["bytes"])


def speeds(rounds: int) -> dict[str, float]:
    """Measure the FLOPs per second of a large bfloat16 matmul, and the bytes per second of a sum.
    """
    a, large = torch.randn(2048, 2048).bfloat16(), torch.ones(1 << 28, dtype=torch.int8)
    times = interleaved([partial(torch.mm, a, a), partial(torch.sum, large.view(torch.int64))],
                        torch.device("cpu"), 3 * rounds)
    return {"flops": 2 * 2048**3 / times[0].best, "bytes": large.numel() / times[1].best}


def measure(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    rows, speed = [], speeds(args.rounds)
    experts = make_experts(Problem(tokens=max(args.tokens), dtype="bfloat16", gated=True,
                                   **SHAPES[shape]))
    sides = sides_of(experts)
    x_TD = torch.randn(max(CHECKED, *args.tokens), experts.problem.model_dim,
                       generator=torch.Generator().manual_seed(1)).bfloat16()
    wrong = [{"side": name, "output": output, "gradient": gradient}
             for name, (output, gradient) in errors(experts, sides, x_TD[:CHECKED]).items()]
    for tokens, backward in [(tokens, backward) for tokens in args.tokens
                             for backward in (False, True)]:
        x = x_TD[:tokens]
        times = interleaved([partial(call, side, x, backward) for _, side in sides.values()],
                            torch.device("cpu"), args.rounds, warmup=1)
        seconds = dict(zip(sides, (one.median for one in times), strict=True))
        rows.append({"tokens": tokens, "backward": backward, "seconds": {
            **seconds, BOUND: bound(experts, x, backward, speed)}})
    return {"rows": rows, "errors": wrong, **speed, "rounds": args.rounds,
            "compiled": [why_not(), why_not_multiply()]}


def body(shape: str, found: dict[str, Any]) -> list[str]:
    cases = {f"{row['tokens']:,} tokens, {'both passes' if row['backward'] else 'forward'}":
                 lambda side, row=row: f"{row['tokens'] / row['seconds'][side]:,.0f}"
             for row in found["rows"]}
    own = page(__name__, found, "shape", shape=shape, **SHAPES[shape], table=columns(
        found["rows"][0]["seconds"], {"side": str, **cases}))
    return [*(page(__name__, found) if shape == next(iter(SHAPES)) else []), *own]


def in_child(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Call `measure` in a new process, because kt-kernel's buffers have the shape of the first
    layer of a process.
    """
    given = argparse.Namespace(**{name: getattr(args, name) for name in OPTIONS})
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, shape, given).result()


PARTS = {shape: (partial(in_child, shape), partial(body, shape)) for shape in SHAPES}
