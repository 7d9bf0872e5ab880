"""Measure the layer and its peers in one run: equal weights, equal input, outputs compared."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_plugin.cli.figures import table
from moe_plugin.planner.units import show_size, show_time
from moe_plugin.utils.messages import short
from scripts.bench.bound import GemmBound
from scripts.bench.measure import (
    Times,
    interleaved,
    peak_extra_mib,
    training_step,
    versions,
)
from scripts.bench.peers import Candidate, UnsupportedProblem, ours, peers
from scripts.bench.peers.base import expert_group
from scripts.bench.problem import Data, Problem, make_data
from scripts.bench.ranks import on_processes

logger = logging.getLogger(__name__)
SLOW = 3.0  # a candidate slower than this multiple of the bound is measured less often
# largest difference of an output, relative to the norm of the whole output
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Result:
    """The result of one candidate.

    Attributes:
        name: name of the candidate.
        median_ms: median time in milliseconds.
        min_ms: shortest time in milliseconds.
        ratio_to_bound: median time divided by the bound's median time.
        ratio_of_minima: shortest time divided by the bound's shortest time.
        peak_extra_mib: peak memory in MiB above weights and inputs, or None if unknown.
        tflops: TFLOP/s of the experts' matmuls.
        gbytes_per_s: GB/s of the least memory traffic.
        error: distance of the output from ours, relative to its norm. None if it is not compared.
        note: difference from the other candidates.
    """

    name: str
    median_ms: float
    min_ms: float
    ratio_to_bound: float
    ratio_of_minima: float
    peak_extra_mib: float | None
    tflops: float
    gbytes_per_s: float
    error: float | None
    note: str


@dataclass(frozen=True)
class LayerReport:
    """Results of all candidates on one problem. The first result is that of our layer.

    Attributes:
        problem: the sizes of the layer.
        bound_ms: median time of the bound in milliseconds.
        bound_min_ms: shortest time of the bound in milliseconds.
        results: results of the candidates.
        refused: for each peer that could not run, the reason.
        threads: number of threads of each rank.
        ranks: number of expert-parallel ranks. Each rank has the problem's tokens, and the results
            are
            those of rank 0.
        forward_only: whether there is no backward pass, as in text generation.
    """

    problem: Problem
    bound_ms: float
    bound_min_ms: float
    results: list[Result]
    refused: dict[str, str]
    threads: int
    ranks: int = 1
    forward_only: bool = False

    @property
    def noise(self) -> float:
        """Median of the bound divided by its minimum."""
        return self.bound_ms / self.bound_min_ms

    def as_dict(self) -> dict[str, object]:
        """Return plain values: our numbers at the top level, and those of the peers in a list."""
        mine = asdict(self.results[0])
        return {
            **mine, "bound_ms": self.bound_ms, "bound_min_ms": self.bound_min_ms,
            **asdict(self.problem), "threads": self.threads, "ranks": self.ranks,
            "forward_only": self.forward_only, "peers": [asdict(r) for r in self.results[1:]],
            "refused": self.refused, "versions": versions(self.problem.device)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerReport:
        """Return the report that `as_dict` wrote, without the versions."""
        def part(kind: type, of: Mapping[str, Any]) -> Any:
            return kind(**{f.name: of[f.name] for f in fields(kind)})

        return cls(part(Problem, values), values["bound_ms"], values["bound_min_ms"],
                   [part(Result, one) for one in (values, *values["peers"])], values["refused"],
                   values["threads"], values.get("ranks", 1), values.get("forward_only", False))

    def parts(self) -> list[str]:
        """Return the parts of a page: a row for each candidate, and the peers that were not
        measured.
        """
        problem, lines = self.problem, [["GEMM bound", _ms(self.bound_ms), _ms(self.bound_min_ms),
                                         "1.00", "1.00", "", "", "", "", ""]]
        for r in self.results:
            memory = "?" if r.peak_extra_mib is None else show_size(r.peak_extra_mib * 2**20)
            lines.append([
                r.name, _ms(r.median_ms), _ms(r.min_ms), f"{r.ratio_to_bound:.2f}",
                f"{r.ratio_of_minima:.2f}", memory, f"{r.tflops:.3f}", f"{r.gbytes_per_s:.1f}",
                "" if r.error is None else f"{r.error:.0e}", r.note])
        head = ["forward" if self.forward_only else "forward + backward", "median", "minimum",
                "ratio", "ratio of minima", "peak memory", "TFLOP/s", "GB/s", "error", "note"]
        ranks = f"{self.ranks} ranks, each " if self.ranks > 1 else ""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return [f"{problem.label()}, {problem.device}, {ranks}{threads}",
                table(head, lines),
                not_measured(self.refused)]


def parts(found: Mapping[str, Any]) -> list[str]:
    """Return the parts of a page from the values of `LayerReport.as_dict`."""
    return LayerReport.from_dict(found).parts()


def _ms(value: float) -> str:
    return show_time(value / 1e3)


def not_measured(peers: Mapping[str, str]) -> str:
    """Return a paragraph about the peers that could not run."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in peers.items():
        by_reason.setdefault(reason, []).append(name)
    why = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return f"These layers were not measured: {why}." if peers else ""


def enter_candidates(stack: contextlib.ExitStack, problem: Problem, data: Data,
                     names: Sequence[str]) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Build our layer and the peers.

    Args:
        stack: closes the resources of the peers at its end.
        problem: sizes of the layer.
        data: weights and inputs.
        names: names of the peers.

    Returns:
        (candidates by name, reason for each peer that cannot run).
    """
    refused = {n: why for n in names if (why := peers.entry(n).why_not()) is not None}
    candidates = {"moe-plugin": ours(problem, data)}
    for name in [n for n in names if n not in refused]:
        try:
            candidates[name] = stack.enter_context(peers.get(name)(problem, data))
        # an ImportError means that a package that the peer itself requires is missing
        except (UnsupportedProblem, ImportError) as reason:
            refused[name] = str(reason)
        except Exception as error:
            if problem.device == "cpu":
                raise
            refused[name] = _failed(error)
    return candidates, refused


def _failed(error: Exception) -> str:
    return short(f"{type(error).__name__}: {error}", 300)


def checked(candidates: dict[str, Candidate], refused: dict[str, str], data: Data,
            problem: Problem) -> dict[str, float | None]:
    """Return each candidate's `agreement` with our layer, after `check_losses`.

    A peer that fails raises an error on CPU. On a GPU, where time is expensive, the peer moves to
    `refused` and the others are still measured.
    """
    ours_alone = {"moe-plugin": candidates["moe-plugin"]}
    errors: dict[str, float | None] = {}
    for name, candidate in list(candidates.items()):
        try:
            errors |= agreement({**ours_alone, name: candidate}, data, problem)
            check_losses({name: candidate}, data, problem)
        except Exception as error:
            if problem.device == "cpu" or name in ours_alone:
                raise
            refused[name] = _failed(error)
            del candidates[name]
    return errors


def run(problem: Problem, names: Sequence[str], rounds: int = 15, *,
        forward_only: bool = False) -> LayerReport:
    """Measure our layer and the named peers on the ranks of `expert_group`.

    Args:
        problem: sizes of the layer.
        names: names of the peers.
        rounds: number of timed rounds.
        forward_only: whether to leave out the backward pass.

    Raises:
        ValueError: if a peer is unknown, has a different output, or computes no balance loss.
    """
    data = make_data(problem)
    device = torch.device(problem.device)
    with contextlib.ExitStack() as stack:
        candidates, refused = enter_candidates(stack, problem, data, names)
        errors = checked(candidates, refused, data, problem)
        steps = {n: torch.no_grad()(partial(c.forward, data.x_TD)) if forward_only else
                 training_step(c.forward, c.parameters, data.x_TD.clone().requires_grad_(),
                               data.grad_TD) for n, c in candidates.items()}
        _warm_up(problem, data)
        memory = {name: peak_extra_mib(fn, device) for name, fn in steps.items()}
        group = expert_group()
        bound = GemmBound(problem, data.local(group.rank, group.size), own_loads(
            problem, data, group.rank, group.size), forward_only)
        # Ranks may measure different times but must run the same candidates in every round, so
        # slow candidates are skipped only on one rank.
        times = interleaved([bound, *steps.values()], device, rounds,
                            slow=SLOW if group.size == 1 else math.inf)
    results = [
        _result(problem.work(forward_only), name, candidates[name].note, mine, times[0],
                memory[name], errors[name])
        for name, mine in zip(steps, times[1:], strict=True)
    ]
    return LayerReport(problem, times[0].median * 1e3, times[0].best * 1e3, results, refused,
                       torch.get_num_threads(), group.size, forward_only)


def own_loads(problem: Problem, data: Data, rank: int, ranks: int) -> list[int]:
    """Return the rows of each expert of a rank, if every rank has the same tokens."""
    own = problem.experts // ranks
    return [ranks * rows for rows in loads(problem, data)[rank * own:(rank + 1) * own]]


def on_ranks(problem: Problem, names: Sequence[str], rounds: int, ranks: int,
             threads: int) -> LayerReport:
    """Run `run` on this number of new processes, with this number of threads each."""
    found: LayerReport = on_processes(ranks, run, problem, names, rounds, threads=threads)
    return found


def loads(problem: Problem, data: Data) -> list[int]:
    """Return the number of rows of each expert."""
    ids_TK = torch.topk(data.x_TD.float() @ data.router_ED.float().t(), problem.top_k,
                        dim=1).indices
    return torch.bincount(ids_TK.reshape(-1).cpu(), minlength=problem.experts).tolist()


def _warm_up(problem: Problem, data: Data) -> None:
    """Run everything that happens only once, before memory is measured.

    A step of a small layer lets libraries allocate their buffers. A forward pass of a layer like
    ours
    lets `experts.compute=auto` choose.
    """
    small = Problem(tokens=64, model_dim=64, hidden_dim=64, experts=2, top_k=1, dtype=problem.dtype,
                    device=problem.device)
    little = make_data(small)
    candidate = ours(small, little)
    training_step(candidate.forward, candidate.parameters, little.x_TD.requires_grad_(),
                  little.grad_TD)()
    ours(problem, data).forward(data.x_TD)


def agreement(candidates: dict[str, Candidate], data: Data,
              problem: Problem) -> dict[str, float | None]:
    """Return the relative distance of each candidate's output from ours, or None if it is not
    compared.

    Raises:
        ValueError: if an output differs from ours by more than `TOLERANCE`.
    """
    outputs: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, candidate in candidates.items():
            outputs[name] = candidate.forward(data.x_TD)[0].float()
    mine, errors = outputs["moe-plugin"], {}
    for name, y in outputs.items():
        errors[name] = float((y - mine).norm() / mine.norm()) if candidates[name].compared else None
        if errors[name] is not None and not errors[name] <= TOLERANCE[problem.dtype]:
            raise ValueError(
                f"{name}'s output differs from ours by {errors[name]:.2e} of its norm: must be <= "
                f"{TOLERANCE[problem.dtype]}. Leave {name} out with --peers, and report this error "
                f"for {problem.label()}")
    return errors


def check_losses(candidates: dict[str, Candidate], data: Data, problem: Problem) -> None:
    """Check that every candidate with experts computes the gradient of its balance loss.

    Without a gradient of the output, the balance loss alone must reach a parameter.

    Raises:
        ValueError: if a candidate has no balance loss.
    """
    if problem.top_k == problem.experts:  # every token uses every expert, so there is no imbalance
        return
    for name, candidate in candidates.items():
        if not candidate.compared:
            continue
        x_TD = data.x_TD.clone().requires_grad_()
        nothing_TD = torch.zeros_like(data.grad_TD)
        training_step(candidate.forward, candidate.parameters, x_TD, nothing_TD)()
        reached = any(p.grad is not None and bool(p.grad.any()) for p in candidate.parameters)
        for parameter in candidate.parameters:
            parameter.grad = None
        if not reached:
            raise ValueError(f"{name} computes no balance loss, but the other layers do, so its "
                             f"time is not comparable. Leave {name} out with --peers")


def _result(work: tuple[float, float], name: str, note: str, mine: Times, bound: Times,
            memory: float | None, error: float | None) -> Result:
    flops, moved = work
    return Result(name=name, median_ms=mine.median * 1e3, min_ms=mine.best * 1e3,
                  ratio_to_bound=mine.median / bound.median, ratio_of_minima=mine.best / bound.best,
                  peak_extra_mib=memory, tflops=flops / mine.median / 1e12,
                  gbytes_per_s=moved / mine.median / 1e9, error=error, note=note)
