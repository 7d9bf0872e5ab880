"""Measure the host time and the operations of one layer call on tiny tensors, for several layers.

With few tokens, nearly all time is spent in Python, dispatch and autograd. A host needs the same
time to launch a layer on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_plugin.cli.figures import columns
from moe_plugin.planner.units import show_time
from scripts.bench.layer import (
    agreement,
    check_losses,
    enter_candidates,
    not_measured,
)
from scripts.bench.measure import training_step, versions
from scripts.bench.peers import Candidate
from scripts.bench.problem import Data, Problem, make_data
from scripts.bench.ranks import on_processes
from scripts.bench.report import load_in_words

PEERS = ("megatron", "transformers_grouped_mm", "torchtitan", "einsum", "dense")
TINY = Problem(tokens=16, model_dim=32, hidden_dim=64, experts=8, top_k=2)
CALLS = 10  # number of calls between two readings of the clock
WARM_UP = 5


@dataclass(frozen=True)
class HostCost:
    """The cost of one candidate. Times are microseconds of processor time per call.

    Attributes:
        name: name of the candidate.
        forward_us: median of the forward pass.
        forward_min_us: minimum of the forward pass.
        step_us: median of forward and backward.
        step_min_us: minimum of forward and backward.
        forward_ops: number of ATen operations of the forward pass, including views. Collectives are
            not
            counted.
        backward_ops: the same number for the backward pass.
        note: difference from the other candidates.
    """

    name: str
    forward_us: float
    forward_min_us: float
    step_us: float
    step_min_us: float
    forward_ops: int
    backward_ops: int
    note: str


@dataclass(frozen=True)
class HostReport:
    """Costs of all candidates on one problem, measured by rank 0 of the expert-parallel ranks.

    Attributes:
        problem: sizes of the layer.
        ranks: number of ranks.
        rounds: number of timed rounds.
        results: costs of the candidates; our layer is the first.
        refused: for each peer that could not run, the reason.
        load: load average of the machine before and after the measurement.
        versions: versions of the packages, with the date and the device.
    """

    problem: Problem
    ranks: int
    rounds: int
    results: list[HostCost]
    refused: dict[str, str]
    load: tuple[float, float]
    versions: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parts(found: Mapping[str, Any]) -> list[str]:
    """Return the parts of a page from the values of `HostReport.as_dict`."""
    theirs = {r["name"]: r["step_us"] for r in found["results"]}.get("megatron")
    ranks = f"{found['ranks']} rank{'s' * (found['ranks'] > 1)}"
    return [
        f"{Problem(**found['problem']).label()} on {ranks}. {load_in_words(found['load'])}",
        columns(found["results"], {
            "layer": "{name}",
            **{head: lambda r, of=of: show_time(r[of] / 1e6) for head, of in (
                ("forward", "forward_us"), ("forward + backward", "step_us"),
                ("minimum", "step_min_us"))},
            "relative to Megatron": lambda r: f"{r['step_us'] / theirs:.2f}" if theirs else "?",
            "operations in forward": "{forward_ops}", "operations in backward": "{backward_ops}",
            "note": "{note}"}),
        not_measured(found["refused"])]


class OperationCount(TorchDispatchMode):
    """Counts the ATen operations, including views, that run inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def count_operations(candidate: Candidate, data: Data) -> tuple[int, int]:
    """Return the numbers of ATen operations of a forward pass and of its backward pass."""
    x_TD = data.x_TD.clone().requires_grad_()
    with OperationCount() as forward:
        y_TD, losses = candidate.forward(x_TD)
    with OperationCount() as backward:
        torch.autograd.backward([y_TD, *losses], [data.grad_TD, *([None] * len(losses))])
    return forward.count, backward.count


def run(problem: Problem, ranks: int, rounds: int, names: Sequence[str] = PEERS) -> HostReport:
    """Measure on `ranks` new processes, each with the number of threads of this process.

    Raises:
        ValueError: if a peer's output differs from ours or a peer has no balance loss, or if the
            experts cannot be divided equally among the ranks.
    """
    if problem.device != "cpu":
        raise ValueError(f"device={problem.device!r} is not supported by bench host: must be cpu, "
                         "because processor time includes no time of a device. Leave out --device")
    if ranks < 1 or problem.experts % ranks:
        raise ValueError(f"{problem.experts} experts cannot be divided among ranks={ranks}. The "
                         "number of ranks must be a divisor of the number of experts")
    return on_processes(ranks, measure, problem, ranks, rounds, tuple(names),
                        threads=torch.get_num_threads())


def measure(problem: Problem, ranks: int, rounds: int, names: Sequence[str]) -> HostReport:
    """Return the report of this rank. All ranks of the default group call this."""
    data, before = make_data(problem), os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        candidates, refused = enter_candidates(stack, problem, data, names)
        # Megatron-core on a CPU needs a mode that intercepts every call of torch. The mode is
        # disabled here for all candidates, because its cost would be part of every call.
        with torch._C.DisableTorchFunction():
            agreement(candidates, data, problem)
            check_losses(candidates, data, problem)
            results = _measured(candidates, data, rounds)
    load = (round(before, 2), round(os.getloadavg()[0], 2))
    found = {name: value for name, value in versions("cpu").items() if name != "triton"}
    return HostReport(problem, ranks, rounds, results, refused, load, found)


def _measured(candidates: dict[str, Candidate], data: Data, rounds: int) -> list[HostCost]:
    calls = {name: list(_calls(c, data)) for name, c in candidates.items()}
    for mine in calls.values():
        _processor_us(mine, WARM_UP)
    # counted after the first calls, which choose implementations and build buffers for later calls
    counts = {name: count_operations(c, data) for name, c in candidates.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, mine in calls.items():
            seconds[name].append(_processor_us(mine, CALLS))
    costs = []
    for name, candidate in candidates.items():
        forward, step = zip(*seconds[name], strict=True)
        costs.append(HostCost(name, statistics.median(forward), min(forward),
                              statistics.median(step), min(step), *counts[name], candidate.note))
    return costs


def _calls(candidate: Candidate, data: Data) -> Iterator[Callable[[], object]]:
    """Yield two functions: a forward pass that records a graph, and forward and backward."""
    x_TD = data.x_TD.clone().requires_grad_()
    yield lambda: candidate.forward(x_TD)
    yield training_step(candidate.forward, candidate.parameters, x_TD, data.grad_TD)


def _processor_us(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the processor time of one call in microseconds, a mean over `repeats` calls, for each
    function.
    """
    found = []
    for call in calls:
        start = time.process_time()
        for _ in range(repeats):
            call()
        found.append((time.process_time() - start) / repeats * 1e6)
    return found
