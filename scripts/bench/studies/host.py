"""Measure the CPU time and the number of ATen operations of one layer call on tiny tensors, for our
layer, Megatron-core's own layer and the layers of other frameworks (peers). The study starts its
own rank processes.

For few tokens, nearly all time is spent in Python, dispatch and autograd. The host takes the same
time to launch a layer on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.bench import layer
from scripts.bench.child import on_processes
from scripts.bench.measure import training_step, versions
from scripts.bench.peers import Candidate
from scripts.bench.problem import SIZES, Data, Problem, make_data, problem_of
from scripts.bench.report import columns, load_in_words, page
from scripts.bench.study import Option
from scripts.bench.sweep import alternate

TITLE = "Host cost of a layer"
PEERS = ("megatron", "transformers_grouped_mm", "torchtitan", "einsum", "dense")
TINY = Problem(tokens=16, model_dim=32, hidden_dim=64, experts=8, top_k=2)
CALLS = 10  # number of calls between two readings of the clock
WARM_UP = 5


def parts(found: Mapping[str, Any]) -> list[str]:
    """Return the sections of a page that shows a result of `measure_rank`."""
    theirs = {r["name"]: r["step_us"] for r in found["results"]}.get("megatron")
    rows = [{**r, **{name: r[f"{name}_us"] / 1e6 for name in ("forward", "step", "step_min")},
             "over": f"{r['step_us'] / theirs:.2f}" if theirs else "?"} for r in found["results"]]
    ranks = f"{found['ranks']} rank{'s' * (found['ranks'] > 1)}"
    return [
        f"{Problem(**found['problem']).label()} on {ranks}. {load_in_words(found['load'])}",
        columns(rows, {
            "layer": "{name}", "forward": "{forward:time}", "forward + backward": "{step:time}",
            "minimum": "{step_min:time}", "relative to Megatron": "{over}",
            "operations in forward": "{forward_ops}", "operations in backward": "{backward_ops}",
            "note": "{note}"}),
        layer.not_measured(found["refused"])]


class OperationCount(TorchDispatchMode):
    """Count the ATen operations, including views, that run inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def count_operations(candidate: Candidate, data: Data) -> tuple[int, int]:
    """Return the number of ATen operations in a forward pass and in the backward pass."""
    x_TD = data.x_TD.clone().requires_grad_()
    with OperationCount() as forward:
        y_TD, losses = candidate.forward(x_TD)
    with OperationCount() as backward:
        torch.autograd.backward([y_TD, *losses], [data.grad_TD, *([None] * len(losses))])
    return forward.count, backward.count


def run(problem: Problem, ranks: int, rounds: int,
        names: Sequence[str] = PEERS) -> dict[str, Any]:
    """Measure in `ranks` new processes, each with as many threads as this process.

    Raises:
        ValueError: if a peer's output differs from our layer's output, if a peer has no balance
            loss, or if the experts cannot be divided equally among the ranks.
    """
    if problem.device != "cpu":
        raise ValueError(f"device={problem.device!r} is not supported by bench host: must be cpu, "
                         "because CPU time does not include the time of a GPU. Leave out --device")
    if ranks < 1 or problem.experts % ranks:
        raise ValueError(f"{problem.experts} experts cannot be divided among ranks={ranks}. The "
                         "number of ranks must be a divisor of the number of experts")
    return on_processes(ranks, measure_rank, problem, ranks, rounds, tuple(names),
                        threads=torch.get_num_threads())


def measure_rank(problem: Problem, ranks: int, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """Measure all candidates on this rank and return their costs. All ranks of the default group
    must call this function.

    `results` contains the cost of each candidate, with our layer first. `refused` contains the
    reason for each peer that could not run.
    """
    data, before = make_data(problem), os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        candidates, refused = layer.enter_candidates(stack, problem, data, names)
        # Megatron-core on a CPU needs a mode that intercepts every call of torch. The mode is
        # disabled here for all candidates, because its cost would be part of every call.
        with torch._C.DisableTorchFunction():
            layer.agreement(candidates, data, problem)
            layer.check_losses(candidates, data, problem)
            results = _measured(candidates, data, rounds)
    load = (round(before, 2), round(os.getloadavg()[0], 2))
    known = {name: value for name, value in versions("cpu").items() if name != "triton"}
    return {"problem": asdict(problem), "ranks": ranks, "rounds": rounds, "results": results,
            "refused": refused, "load": load, "versions": known}


def _measured(candidates: dict[str, Candidate], data: Data, rounds: int) -> list[dict[str, Any]]:
    """Return the CPU time of a call in microseconds, and the number of ATen operations. The time
    and the operations are returned for a forward pass, and for a forward and backward pass
    ("step"). Views are counted as operations, and collectives are not counted.
    """
    calls = {name: list(_calls(c, data)) for name, c in candidates.items()}
    for mine in calls.values():
        _processor_us(mine, WARM_UP)
    # counted after the first calls, which choose implementations and build buffers for later calls
    counts = {name: count_operations(c, data) for name, c in candidates.items()}
    times = alternate({name: partial(_processor_us, mine, CALLS) for name, mine in calls.items()},
                      rounds, warm_up=0)
    costs = []
    for name, candidate in candidates.items():
        forward, step = zip(*times[name], strict=True)
        costs.append({
            "name": name, "forward_us": statistics.median(forward), "forward_min_us": min(forward),
            "step_us": statistics.median(step), "step_min_us": min(step),
            "forward_ops": counts[name][0], "backward_ops": counts[name][1],
            "note": candidate.note})
    return costs


def _calls(candidate: Candidate, data: Data) -> Iterator[Callable[[], object]]:
    """Yield two functions: one runs a forward pass that records the autograd graph, and the other
    runs a forward and backward pass.
    """
    x_TD = data.x_TD.clone().requires_grad_()
    yield lambda: candidate.forward(x_TD)
    yield training_step(candidate.forward, candidate.parameters, x_TD, data.grad_TD)


def _processor_us(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """For each function, return the CPU time of one call in microseconds, as a mean over `repeats`
    calls.
    """
    found = []
    for call in calls:
        start = time.process_time()
        for _ in range(repeats):
            call()
        found.append((time.process_time() - start) / repeats * 1e6)
    return found


OPTIONS = {
    **SIZES, **{name: replace(SIZES[name], default=default, quick=None) for name, default in (
        ("tokens", TINY.tokens), ("model-dim", TINY.model_dim), ("hidden-dim", TINY.hidden_dim),
        ("threads", 1))},
    "rounds": replace(SIZES["rounds"], default=40),
    "ranks": Option((1, 2), "numbers of expert-parallel ranks")}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    problem = problem_of(args)
    return [run(replace(problem, gated=gated), ranks, args.rounds)
            for gated in sorted({problem.gated, True}) for ranks in args.ranks]


def body(found: list[dict[str, Any]]) -> list[str]:
    return page(__name__, found[0], layers=[part for one in found for part in parts(one)])
