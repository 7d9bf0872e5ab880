"""Host time and operations of one layer call on tiny tensors: ours, Megatron-core's, einsum, dense.

With few tokens nearly all time goes to Python, dispatch and autograd: what a host spends to launch
a layer, on a GPU too.
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

PEERS = ("megatron", "transformers_grouped_mm", "torchtitan", "einsum", "dense")
TINY = Problem(tokens=16, model_dim=32, hidden_dim=64, experts=8, top_k=2)
CALLS = 10  # in a row, between two looks at the clock
WARM_UP = 5


@dataclass(frozen=True)
class HostCost:
    """One candidate. Times in microseconds of processor time a call, medians and minima of rounds.

    forward_ops, backward_ops: ATen operations of a call, views included; collectives are none.
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
    """All candidates of one problem on `ranks` expert-parallel ranks, as rank 0 measured them.

    Attributes:
        results: ours first.
        refused: peers that could not run, with the reason.
        load: load average of the machine before and after.
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
    """Of a page, from what `HostReport.as_dict` gave: a row per candidate; peers that were not
    measured.
    """
    theirs = {r["name"]: r["step_us"] for r in found["results"]}.get("megatron")
    return [
        f"{Problem(**found['problem']).label()}, expert-parallel ranks: {found['ranks']}; load "
        f"average {found['load'][0]:g} before, {found['load'][1]:g} after",
        columns(found["results"], {
            "layer": "{name}",
            **{head: lambda r, of=of: show_time(r[of] / 1e6) for head, of in (
                ("forward", "forward_us"), ("forward + backward", "step_us"),
                ("least", "step_min_us"))},
            "of megatron's": lambda r: f"{r['step_us'] / theirs:.2f}" if theirs else "?",
            "operations forward": "{forward_ops}", "backward": "{backward_ops}",
            "note": "{note}"}),
        not_measured(found["refused"])]


class OperationCount(TorchDispatchMode):
    """Counts the ATen operations that run inside `with`, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def count_operations(candidate: Candidate, data: Data) -> tuple[int, int]:
    """ATen operations of a forward pass, and of its backward pass."""
    x_TD = data.x_TD.clone().requires_grad_()
    with OperationCount() as forward:
        y_TD, losses = candidate.forward(x_TD)
    with OperationCount() as backward:
        torch.autograd.backward([y_TD, *losses], [data.grad_TD, *([None] * len(losses))])
    return forward.count, backward.count


def run(problem: Problem, ranks: int, rounds: int, names: Sequence[str] = PEERS) -> HostReport:
    """Measure on `ranks` new processes, with as many threads each as this one has.

    Raises:
        ValueError: a peer whose output is not ours, or without balance loss; sizes that do not
            divide over the ranks.
    """
    if problem.device != "cpu":
        raise ValueError(f"device={problem.device!r} does not fit bench host: must be cpu, where "
                         "processor time holds nothing of a device; leave --device out")
    if ranks < 1 or problem.experts % ranks:
        raise ValueError(f"ranks={ranks} does not fit {problem.experts} experts: must be a divisor")
    return on_processes(ranks, measure, problem, ranks, rounds, tuple(names),
                        threads=torch.get_num_threads())


def measure(problem: Problem, ranks: int, rounds: int, names: Sequence[str]) -> HostReport:
    """The report of this rank; all ranks of the default group call it."""
    data, before = make_data(problem), os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        candidates, refused = enter_candidates(stack, problem, data, names)
        # Megatron-core on a CPU needs a mode that looks at every call of torch: it is off here, for
        # all candidates
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
    # counted after the first calls, which choose and build what later ones reuse
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
    """A forward pass with a graph, and forward and backward."""
    x_TD = data.x_TD.clone().requires_grad_()
    yield lambda: candidate.forward(x_TD)
    yield training_step(candidate.forward, candidate.parameters, x_TD, data.grad_TD)


def _processor_us(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Processor time of this process for one of `repeats` calls of each, in microseconds."""
    found = []
    for call in calls:
        start = time.process_time()
        for _ in range(repeats):
            call()
        found.append((time.process_time() - start) / repeats * 1e6)
    return found
