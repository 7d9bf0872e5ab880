"""Measures the layer and its peers: same weights, same input, outputs compared, one run."""

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
SLOW = 3.0  # multiple of the bound above which a candidate is measured less often
# relative, in the norm of the whole output
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Result:
    """One candidate. Times in ms.

    Attributes:
        ratio_to_bound: median over the bound's median.
        error: relative distance of its output from ours.
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
    """All candidates of one problem; the first result is ours.

    Attributes:
        refused: peers that could not run, with the reason.
        threads, ranks: threads of each expert-parallel rank; each rank has the problem's tokens,
            and numbers are those of rank 0.
        forward_only: without a backward pass, as text is generated.
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
        """Median of the bound over its minimum."""
        return self.bound_ms / self.bound_min_ms

    def as_dict(self) -> dict[str, object]:
        """Our numbers at the top level, those of the peers in a list."""
        mine = asdict(self.results[0])
        return {
            **mine, "bound_ms": self.bound_ms, "bound_min_ms": self.bound_min_ms,
            **asdict(self.problem), "threads": self.threads, "ranks": self.ranks,
            "forward_only": self.forward_only, "peers": [asdict(r) for r in self.results[1:]],
            "refused": self.refused, "versions": versions(self.problem.device)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerReport:
        """The inverse of `as_dict`, without versions."""
        def part(kind: type, of: Mapping[str, Any]) -> Any:
            return kind(**{f.name: of[f.name] for f in fields(kind)})

        return cls(part(Problem, values), values["bound_ms"], values["bound_min_ms"],
                   [part(Result, one) for one in (values, *values["peers"])], values["refused"],
                   values["threads"], values.get("ranks", 1), values.get("forward_only", False))

    def parts(self) -> list[str]:
        """Of a page: a row per candidate; peers that were not measured."""
        problem, lines = self.problem, [["GEMM bound", _ms(self.bound_ms), _ms(self.bound_min_ms),
                                         "1.00", "1.00", "", "", "", "", ""]]
        for r in self.results:
            memory = "?" if r.peak_extra_mib is None else show_size(r.peak_extra_mib * 2**20)
            lines.append([
                r.name, _ms(r.median_ms), _ms(r.min_ms), f"{r.ratio_to_bound:.2f}",
                f"{r.ratio_of_minima:.2f}", memory, f"{r.tflops:.3f}", f"{r.gbytes_per_s:.1f}",
                "" if r.error is None else f"{r.error:.0e}", r.note])
        head = ["forward" if self.forward_only else "forward + backward", "median", "minimum",
                "ratio", "ratio of min", "peak", "TFLOP/s", "GB/s", "error", "note"]
        ranks = f"{self.ranks} ranks, each " if self.ranks > 1 else ""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return [f"{problem.label()}, {problem.device}, {ranks}{threads}",
                table(head, lines),
                not_measured(self.refused)]


def parts(found: Mapping[str, Any]) -> list[str]:
    """Of a page, from what `LayerReport.as_dict` gave."""
    return LayerReport.from_dict(found).parts()


def _ms(value: float) -> str:
    return show_time(value / 1e3)


def not_measured(peers: Mapping[str, str]) -> str:
    """A paragraph on peers that could not run."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in peers.items():
        by_reason.setdefault(reason, []).append(name)
    why = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return f"Not measured: {why}." if peers else ""


def enter_candidates(stack: contextlib.ExitStack, problem: Problem, data: Data,
                     names: Sequence[str]) -> tuple[dict[str, Candidate], dict[str, str]]:
    """(our layer and the peers by name, why others cannot run). stack: ends what peers began."""
    refused = {n: why for n in names if (why := peers.entry(n).why_not()) is not None}
    candidates = {"moe-plugin": ours(problem, data)}
    for name in [n for n in names if n not in refused]:
        try:
            candidates[name] = stack.enter_context(peers.get(name)(problem, data))
        except (UnsupportedProblem, ImportError) as reason:  # or a package that it needs itself
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
    """Each candidate's `agreement` with ours, after `check_losses`.

    On a GPU, where time is precious, a peer that fails moves to `refused`; on a CPU it is an error.
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
    """Measure our layer and the named peers, over the ranks of `expert_group`.

    Args:
        forward_only: without a backward pass.
    Raises:
        ValueError: unknown peer, a peer whose output is not ours, or one without balance loss.
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
        # ranks may see different times, and must run the same
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
    """Rows of each expert of a rank, where every rank has the same tokens."""
    own = problem.experts // ranks
    return [ranks * rows for rows in loads(problem, data)[rank * own:(rank + 1) * own]]


def on_ranks(problem: Problem, names: Sequence[str], rounds: int, ranks: int,
             threads: int) -> LayerReport:
    """`run` on new processes of as many ranks, with as many threads each."""
    found: LayerReport = on_processes(ranks, run, problem, names, rounds, threads=threads)
    return found


def loads(problem: Problem, data: Data) -> list[int]:
    """Rows of each expert."""
    ids_TK = torch.topk(data.x_TD.float() @ data.router_ED.float().t(), problem.top_k,
                        dim=1).indices
    return torch.bincount(ids_TK.reshape(-1).cpu(), minlength=problem.experts).tolist()


def _warm_up(problem: Problem, data: Data) -> None:
    """Run what happens only once before memory is counted.

    A step of a small layer makes libraries allocate their buffers; a forward pass of a layer like
    ours makes `experts.compute=auto` choose.
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
    """Relative distance of each candidate's output from ours; None: it computes something else.

    Raises: ValueError: an output that is not ours.
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
                f"{TOLERANCE[problem.dtype]}; leave it out with --peers and report this for "
                f"{problem.label()}")
    return errors


def check_losses(candidates: dict[str, Candidate], data: Data, problem: Problem) -> None:
    """Check that every candidate with experts pays for its balance loss: without a gradient of
    its output it alone reaches a parameter.

    Raises: ValueError: a candidate without one.
    """
    if problem.top_k == problem.experts:  # nothing to balance
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
            raise ValueError(f"{name} computes no balance loss, as the other layers do: its time "
                             "is not comparable; leave it out with --peers")


def _result(work: tuple[float, float], name: str, note: str, mine: Times, bound: Times,
            memory: float | None, error: float | None) -> Result:
    flops, moved = work
    return Result(name=name, median_ms=mine.median * 1e3, min_ms=mine.best * 1e3,
                  ratio_to_bound=mine.median / bound.median, ratio_of_minima=mine.best / bound.best,
                  peak_extra_mib=memory, tflops=flops / mine.median / 1e12,
                  gbytes_per_s=moved / mine.median / 1e9, error=error, note=note)
