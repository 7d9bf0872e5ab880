"""Measure our layer and the layers of other frameworks (peers) in one run. All layers use the same
weights and inputs, and their outputs are compared.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_plugin.planner.units import show_size
from moe_plugin.utils.messages import short
from scripts.bench import measure
from scripts.bench.peers import Candidate, UnsupportedProblem, ours, peers
from scripts.bench.peers.base import expert_group
from scripts.bench.problem import Data, Problem, make_data
from scripts.bench.report import columns

logger = logging.getLogger(__name__)
SLOW = 3.0  # a candidate slower than this multiple of the bound is measured less often
# largest difference of an output, relative to the norm of the whole output
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}


def parts(found: Mapping[str, Any]) -> list[str]:
    """Return the sections of a page: a label that describes the layer, a table with one row per
    candidate, and the peers that were not measured.
    """
    bound = {"name": "GEMM bound", "median_ms": found["bound_ms"], "min_ms": found["bound_min_ms"],
             "ratio_to_bound": 1.0, "ratio_of_minima": 1.0}
    empty = dict.fromkeys(("tflops", "gbytes_per_s", "error", "note"))
    rows = [{
        **empty, **row, "median": row["median_ms"] / 1e3, "min": row["min_ms"] / 1e3,
        "memory": "" if row is bound else "?" if row["peak_extra_mib"] is None else show_size(
            row["peak_extra_mib"] * 2**20)} for row in (bound, *results(found))]
    ranks = f"{found.get('ranks', 1)} ranks, each " * (found.get("ranks", 1) > 1)
    threads = f"{found['threads']} thread{'s' * (found['threads'] > 1)}"
    return [
        f"{Problem.of(found).label()}, {found['device']}, {ranks}{threads}",
        columns(rows, {
            "forward" if found.get("forward_only") else "forward + backward": "{name}",
            "median": "{median:time}", "minimum": "{min:time}", "ratio": "{ratio_to_bound:.2f}",
            "ratio of minima": "{ratio_of_minima:.2f}", "peak memory": "{memory}",
            "TFLOP/s": "{tflops:.3f}", "GB/s": "{gbytes_per_s:.1f}", "error": "{error:.0e}",
            "note": "{note}"}),
        not_measured(found["refused"])]


def results(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the results of all candidates, beginning with our layer."""
    return [found, *found["peers"]]


def noise(found: Mapping[str, Any]) -> float:
    """Return the noise of the measurement: the median time of the GEMM bound divided by its minimum
    time.
    """
    return found["bound_ms"] / found["bound_min_ms"]


def not_measured(refused: Mapping[str, str]) -> str:
    """Return a paragraph that lists the layers of other frameworks that could not run. Layers that
    have been removed from the benchmark are left out.
    """
    by_reason: dict[str, list[str]] = {}
    for name in [name for name in refused if name in peers.names()]:
        by_reason.setdefault(refused[name], []).append(name)
    why = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return f"These layers were not measured: {why}." if why else ""


def enter_candidates(stack: contextlib.ExitStack, problem: Problem, data: Data,
                     names: Sequence[str]) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Build our layer and the layers of the other frameworks.

    Args:
        stack: exit stack that closes the resources of all layers.

    Returns: A pair (candidates by name, reason for each peer that cannot run).
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
    """Check the losses of each candidate, and return the relative distance between its output and
    our layer's output.

    On the CPU, an error of any candidate is raised. On a GPU, where device time is expensive, the
    error is added to `refused` and the other candidates are still measured.
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
        forward_only: bool = False) -> dict[str, Any]:
    """Measure our layer and the given peers on the ranks of `expert_group`.

    Args:
        forward_only: whether to measure only the forward pass.

    Returns: The result of our layer, the sizes of the problem, the time of the GEMM bound
        (`bound_ms`, `bound_min_ms`), the results of the peers, and the reason for each peer that
        could not run (`refused`). Each result contains times, the peak memory in addition to
        weights and inputs (`peak_extra_mib`), the achieved rates, and the relative distance from
        our layer's output (`error`). The achieved rates are computed from the minimum amount of
        work for the experts.

    Raises:
        ValueError: if a peer is unknown, computes a different output, or does not compute a balance
            loss.
    """
    data = make_data(problem)
    device = torch.device(problem.device)
    with contextlib.ExitStack() as stack:
        candidates, refused = enter_candidates(stack, problem, data, names)
        errors = checked(candidates, refused, data, problem)
        steps = {n: torch.no_grad()(partial(c.forward, data.x_TD)) if forward_only else
                 measure.training_step(c.forward, c.parameters, data.x_TD.clone().requires_grad_(),
                                       data.grad_TD) for n, c in candidates.items()}
        _warm_up(problem, data)
        memory = {name: measure.peak_extra_mib(fn, device) for name, fn in steps.items()}
        group = expert_group()
        bound = GemmBound(problem, data.local(group.rank, group.size), loads(
            problem, data, group.rank, group.size), forward_only)
        # Ranks may measure different times but must run the same candidates in every round, so
        # slow candidates are skipped only on one rank.
        times = measure.interleaved([bound, *steps.values()], device, rounds,
                                    slow=SLOW if group.size == 1 else math.inf)
    ours_, *others = [
        _result(problem.work(forward_only), name, candidates[name].note, mine, times[0],
                memory[name], errors[name])
        for name, mine in zip(steps, times[1:], strict=True)]
    return {
        **ours_, "bound_ms": times[0].median * 1e3, "bound_min_ms": times[0].best * 1e3,
        **asdict(problem), "threads": torch.get_num_threads(), "ranks": group.size,
        "forward_only": forward_only, "peers": others, "refused": refused,
        "versions": measure.versions(problem.device)}


class GemmBound:
    """The matmuls of the forward and backward pass without any other operations, writing to
    preallocated memory.

    On the CPU, the GEMM bound is one dense matmul per expert with the expert's actual number of
    rows. On a GPU, the GEMM bound is a single dense matmul over all rows, which has the same number
    of FLOPs.

    Args:
        counts: number of rows for each expert.
        forward_only: whether to run only the matmuls of the forward pass.
    """

    def __init__(self, problem: Problem, data: Data, counts: list[int],
                 forward_only: bool = False) -> None:
        self.forward_only = forward_only
        rows = sum(counts)
        self.rows_RD = data.x_TD.repeat(-(-rows // problem.tokens), 1)[:rows].clone()
        self.inner_RF = torch.randn(rows, problem.hidden_dim,
                                    device=problem.device).to(problem.torch_dtype)
        self.counts = counts if problem.device == "cpu" else [rows]
        used = len(self.counts)
        self.first = [w[:used] for w in (data.w_in_LDF, data.w_gate_LDF) if w is not None]
        self.second = data.w_out_LFD[:used]
        self.out_RD, self.out_RF = torch.empty_like(self.rows_RD), torch.empty_like(self.inner_RF)
        self.grads = [torch.empty_like(w) for w in (*self.first, self.second)]

    def __call__(self) -> None:
        """Run all matmuls once."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                self._expert(expert, slice(start, start + count))
            start += count

    def _expert(self, expert: int, span: slice) -> None:
        x, h = self.rows_RD[span], self.inner_RF[span]
        out_x, out_h = self.out_RD[span], self.out_RF[span]
        for w, grad in zip(self.first, self.grads, strict=False):
            self._linear(x, w[expert], h, out_h, out_x, grad[expert])
        self._linear(h, self.second[expert], x, out_x, out_h, self.grads[-1][expert])

    def _linear(self, x: Tensor, w: Tensor, grad: Tensor, y: Tensor, grad_x: Tensor,
                grad_w: Tensor) -> None:
        """Run the three matmuls of a linear layer: y = x w, grad_x = grad w^T, grad_w = x^T grad.
        """
        torch.mm(x, w, out=y)
        if not self.forward_only:
            torch.mm(grad, w.t(), out=grad_x)
            torch.mm(x.t(), grad, out=grad_w)


def loads(problem: Problem, data: Data, rank: int = 0, ranks: int = 1) -> list[int]:
    """Return the number of rows that the router sends to each of a rank's experts, assuming that
    all ranks have the same tokens.
    """
    ids_TK = torch.topk(data.x_TD.float() @ data.router_ED.float().t(), problem.top_k,
                        dim=1).indices
    rows_E = torch.bincount(ids_TK.reshape(-1).cpu(), minlength=problem.experts)
    return (ranks * rows_E.chunk(ranks)[rank]).tolist()


def _warm_up(problem: Problem, data: Data) -> None:
    """Run all one-time initialization before memory is measured. A step of a small layer makes
    libraries allocate their buffers. A forward pass with the sizes of our layer makes
    `experts.compute=auto` choose an implementation.
    """
    small = Problem(tokens=64, model_dim=64, hidden_dim=64, experts=2, top_k=1, dtype=problem.dtype,
                    device=problem.device)
    little = make_data(small)
    candidate = ours(small, little)
    measure.training_step(candidate.forward, candidate.parameters, little.x_TD.requires_grad_(),
                          little.grad_TD)()
    ours(problem, data).forward(data.x_TD)


def agreement(candidates: dict[str, Candidate], data: Data,
              problem: Problem) -> dict[str, float | None]:
    """For each candidate, return the relative distance between its output and our layer's output,
    or None if the output is not compared.

    Raises:
        ValueError: if an output differs from our layer's output by more than `TOLERANCE`.
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
                f"{name}'s output differs from ours by {errors[name]:.2e} relative to the norm of "
                f"our output: must be <= {TOLERANCE[problem.dtype]}. Leave {name} out with "
                f"--peers, and report this error for {problem.label()}")
    return errors


def check_losses(candidates: dict[str, Candidate], data: Data, problem: Problem) -> None:
    """Check that every candidate with comparable output computes the gradient of a balance loss.

    The gradient of the output is set to zero, so only the balance loss contributes to the
    parameters' gradients.

    Raises:
        ValueError: if no parameter of a candidate gets a gradient from the balance loss.
    """
    if problem.top_k == problem.experts:  # every token uses every expert, so there is no imbalance
        return
    for name, candidate in candidates.items():
        if not candidate.compared:
            continue
        x_TD = data.x_TD.clone().requires_grad_()
        nothing_TD = torch.zeros_like(data.grad_TD)
        measure.training_step(candidate.forward, candidate.parameters, x_TD, nothing_TD)()
        reached = any(p.grad is not None and bool(p.grad.any()) for p in candidate.parameters)
        for parameter in candidate.parameters:
            parameter.grad = None
        if not reached:
            raise ValueError(f"{name} computes no balance loss, but the other layers do, so its "
                             f"time is not comparable. Leave {name} out with --peers")


def _result(work: tuple[float, float], name: str, note: str, mine: measure.Times,
            bound: measure.Times, memory: float | None, error: float | None) -> dict[str, Any]:
    flops, moved = work
    return {
        "name": name, "median_ms": mine.median * 1e3, "min_ms": mine.best * 1e3,
        "ratio_to_bound": mine.median / bound.median, "ratio_of_minima": mine.best / bound.best,
        "peak_extra_mib": memory, "tflops": flops / mine.median / 1e12,
        "gbytes_per_s": moved / mine.median / 1e9, "error": error, "note": note}
