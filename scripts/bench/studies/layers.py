"""Studies of a layer, its peers and its operations. Some of the studies measure one problem, and
others measure all problems of a page.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_plugin.planner.units import show_size, show_time
from scripts.bench import kernels, layer, plots
from scripts.bench.child import on_processes
from scripts.bench.peers import peers
from scripts.bench.problem import SIZES, Problem, problem_of
from scripts.bench.report import columns, page
from scripts.bench.study import Option, with_machine

log = logging.getLogger(__name__)
FEW = Problem(tokens=4096, model_dim=512, hidden_dim=2048, experts=8, top_k=2)
MANY = Problem(tokens=4096, model_dim=256, hidden_dim=512, experts=64, top_k=2)
# Gated experts have three matrices instead of two. With two thirds of the inner width (rounded to a
# multiple of 32) they do as much work as the layers above.
GATED = [replace(FEW, gated=True, hidden_dim=1376), replace(MANY, gated=True, hidden_dim=352)]
LAYERS = {
    "cpu": [replace(one, dtype=dtype) for kind in (GATED, [FEW, MANY])
            for dtype in ("float32", "bfloat16") for one in kind],
    "cuda": [
        Problem(tokens=16384, model_dim=4096, hidden_dim=14336, experts=8, top_k=2,
                dtype="bfloat16", device="cuda"),
        Problem(tokens=32768, model_dim=2048, hidden_dim=1408, experts=64, top_k=6,
                dtype="bfloat16", gated=True, device="cuda"),
        Problem(tokens=65536, model_dim=2048, hidden_dim=2048, experts=64, top_k=2,
                dtype="bfloat16", device="cuda"),
    ],
}
AXES = {
    "tokens": [512, 1024, 2048, 4096, 8192], "experts": [4, 8, 16, 32, 64], "top_k": [1, 2, 4, 8]
}
TOO_LARGE_FOR_EINSUM = 1 << 31  # number of elements of the T x E x C mask
GENERATED = 64  # number of tokens in a decoding batch
MOST_MIB = 20.0  # the layer should need at most this memory in addition to its inputs
SMALL = {"tokens": 64, "model_dim": 16, "hidden_dim": 32, "experts": 4, "top_k": 1}
PROBLEMS = {
    "device": SIZES["device"],
    "threads": Option(2, "number of CPU threads", least=1),
    "rounds": Option(25, "number of timed rounds", quick=1, least=1),
}
ATTEMPTS = {"attempts": Option(3, "maximum number of attempts if a measurement is noisy", quick=1)}


def problems(args: argparse.Namespace) -> list[Problem]:
    """Set the number of threads, and return all problems for a device. With --quick, return a
    single small problem.
    """
    torch.set_num_threads(args.threads)
    every = LAYERS[args.device]
    return [replace(every[0], **SMALL)] if args.quick else every


def quietest(problem: Problem, args: argparse.Namespace, ranks: int = 1,
             forward_only: bool = False) -> dict[str, Any]:
    """Measure our layer and its peers several times, and return the attempt with the least noise.

    The noise is the median time of the bound divided by its minimum time.

    Args:
        ranks: number of ranks that share the experts and the CPU threads.
        forward_only: whether to measure only the forward pass.
    """
    slots = problem.tokens * problem.experts * (problem.rows // problem.experts)
    names = [n for n in peers.names()
             if n != "einsum" or ranks == 1 and slots < TOO_LARGE_FOR_EINSUM]
    log.info("%s: measuring %s", problem.label(), ", ".join(names))
    measure = partial(layer.run, forward_only=forward_only)
    if ranks > 1:
        measure = partial(on_processes, ranks, layer.run, threads=max(1, args.threads // ranks))
    found: list[dict[str, Any]] = []
    while len(found) < args.attempts and not any(layer.noise(one) < 1.05 for one in found):
        found.append(measure(problem, names, args.rounds))
    return min(found, key=layer.noise)


class OneLayer:
    """Measure the forward and backward pass of our MoE layer and of every installed peer, with the
    same weights and inputs. The study checks that the outputs of all layers agree. The bound is the
    time of the experts' matmuls alone, measured in the same run.
    """

    TITLE = "One layer and its peers"
    OPTIONS = {**SIZES, "peers": Option("all", "all, none, or names separated by commas from: "
                                               f"{', '.join(peers.names())}")}

    @staticmethod
    def measure(args: argparse.Namespace) -> dict[str, Any]:
        names = {"all": peers.names(), "none": []}.get(args.peers, args.peers.split(","))
        return layer.run(problem_of(args), names, args.rounds)

    @staticmethod
    def body(found: dict[str, Any]) -> list[str]:
        return ["The table compares our layer with other implementations of the same layer.",
                *layer.parts(found)]


DRAWN = 4  # number of problems with a plot


def _draw(number: int, found: dict[str, Any], path: Path) -> None:
    shown = found.get("one_rank", [])
    if number < len(shown):
        plots.layer_plot(shown[number], path)


def _one_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [with_machine(quietest, problem, args) for problem in problems(args)]


def _two_ranks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure gated layers on two ranks, because all peers support gated layers on several ranks.
    Gated layers are not measured on a GPU or with `--quick`.
    """
    return [with_machine(quietest, problem, args, 2) for problem in problems(args)
            if problem.gated and problem.device == "cpu" and not args.quick]


def _generated(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [with_machine(partial(quietest, forward_only=True),
                         replace(problem, tokens=min(GENERATED, problem.tokens)), args)
            for problem in problems(args) if problem.gated]


def aim_of(one: dict[str, Any]) -> float | None:
    """Return the target for the ratio to the lower bound on one rank, or None if there is no target
    for this layer.
    """
    problem = Problem.of(one)
    if problem not in LAYERS["cpu"]:
        return None
    few = problem.experts == FEW.experts
    if problem.gated:
        return 1.08 if few else 1.20
    return (1.02 if problem.dtype == "float32" else 1.06) if few else 1.18


def aims(found: list[dict[str, Any]]) -> list[str]:
    """Return the targets on one rank, and whether each target is reached."""
    def met(reached: bool) -> str:
        return "yes" if reached else "no"

    rows = [{
        **one, "label": Problem.of(one).label(), "aim": aim,
        "ratio_reached": met(round(one["ratio_to_bound"], 2) <= aim),
        "memory_reached": met(one["peak_extra_mib"] <= MOST_MIB)}
        for one in found if (aim := aim_of(one)) is not None]
    return page(__name__, {}, "aims", rows=rows) if rows else []


def _each_layer(found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return []
    parts = []
    for number, one in enumerate(found):
        label, shown, _ = layer.parts(one)
        picture = f"![Time and memory of every candidate](layer_{number}.svg)" * (number < DRAWN)
        parts += page(__name__, one, "one layer", label=label, table=shown, picture=picture)
    return page(__name__, found[0], aims=aims(found), layers=parts,
                not_measured=_not_measured(found))


def _not_measured(found: list[dict[str, Any]]) -> str:
    reasons: dict[str, dict[str, None]] = {}
    for one in found:
        for name, reason in one["refused"].items():
            reasons.setdefault(name, {})[reason] = None
    return layer.not_measured({name: ", or ".join(every) for name, every in reasons.items()})


def _one_table(title: str, found: list[dict[str, Any]]) -> list[str]:
    """Return a table with one row for each candidate and one column for each layer."""
    if not found:
        return []
    names = dict.fromkeys(result["name"] for one in found for result in layer.results(one))
    return page(
        __name__, found[0], "several ranks", title=title, not_measured=_not_measured(found),
        threads=f"{found[0]['threads']} thread{'s' * (found[0]['threads'] > 1)}",
        loads=", ".join(f"{one['load'][0]:g}" for one in found),
        table=columns(names, {title: "{0}"} | {
            Problem.of(one).label(): partial(_cell, {r["name"]: r for r in layer.results(one)})
            for one in found}))


def _cell(results: dict[str, Mapping[str, Any]], name: str) -> str:
    if name not in results:
        return ""
    one, mib = results[name], results[name]["peak_extra_mib"]
    size = "?" if mib is None else show_size(mib * 2**20)
    return f"{show_time(one['median_ms'] / 1e3)}, {one['ratio_to_bound']:.2f}, {size}"


class AllLayers:
    """Measure our layer and every installed peer on all problems of the page. The study measures
    the forward and backward pass on one rank and on two ranks, and the forward pass of 64 tokens,
    as in text generation. The bound is the time of the experts' matmuls alone, one after the other,
    measured in the same run. Layers that compute several matmuls concurrently, such as our layer in
    float32, may be faster than the bound.
    """

    TITLE = "The layer and its peers"
    OPTIONS = PROBLEMS | ATTEMPTS
    PARTS = {
        "one_rank": (_one_rank, _each_layer),
        "two_ranks": (_two_ranks, partial(_one_table, "forward and backward on two ranks")),
        "generated": (_generated, partial(_one_table, "forward pass of 64 tokens"))}
    PLOTS = {f"layer_{number}.svg": partial(_draw, number) for number in range(DRAWN)}


class OneProblemsOperations:
    """Measure every operation of a layer with the given sizes: the time of each implementation that
    runs on this machine, and the bound. The bound is the bytes divided by the measured copy
    bandwidth, or the FLOPs divided by the measured rate of a large matmul, whichever is larger.
    """

    TITLE = "Operations of one layer"
    OPTIONS = SIZES

    @staticmethod
    def measure(args: argparse.Namespace) -> dict[str, Any]:
        return kernels.run(problem_of(args), args.rounds)

    @staticmethod
    def body(found: dict[str, Any]) -> list[str]:
        return ["The table compares the time of each operation with its bound.",
                *kernels.parts(found)]


class AllOperations(OneProblemsOperations):
    """Measure every operation of the layer on the first three problems of the page: the time of
    each implementation that runs on this machine, and the bound. The bound is the bytes divided by
    the measured copy bandwidth, or the FLOPs divided by the measured rate of a large matmul,
    whichever is larger.
    """

    TITLE = "Each operation and its bound"
    OPTIONS = PROBLEMS

    @staticmethod
    def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
        return [kernels.run(one, args.rounds) for one in problems(args)[:3]]

    @staticmethod
    def body(found: list[dict[str, Any]]) -> list[str]:
        return page(__name__, found[0], "operations",
                    operations=[part for one in found for part in kernels.parts(one)])


class Scaling:
    """Measure how the time and memory of our layer depend on the number of tokens, the number of
    experts and the number of experts per token.
    """

    TITLE = "How the layer scales"
    OPTIONS = PROBLEMS | {"points": Option(max(map(len, AXES.values())),
                                           "maximum number of points of an axis", quick=1)}

    @staticmethod
    def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
        torch.set_num_threads(args.threads)
        base = MANY if args.device == "cpu" else replace(LAYERS["cuda"][2], tokens=16384)
        found = []
        for axis, values in AXES.items():
            for value in values[:args.points]:
                size = value * (base.tokens // 4096) if axis == "tokens" else value
                problem = replace(base, **{axis: size})
                log.info("scaling: %s", problem.label())
                found.append({"axis": axis, **layer.run(problem, [], args.rounds)})
        return found

    @staticmethod
    def body(found: list[dict[str, Any]]) -> list[str]:
        return page(__name__, found[0], "scaling", points=[
            {**one, "value": one[one["axis"]], "peak_extra_mib": one["peak_extra_mib"] or 0}
            for one in found])

    PLOTS = {"scaling.svg": plots.scaling_plot}


# lines that Triton's bindings print at the end of a process that failed
LEAKS = re.compile(r"nanobind: |See https://nanobind\.| - (leaked |\.\.\. skipped)")


def _on_gpu(part: str, number: int, args: argparse.Namespace) -> dict[str, Any]:
    every = problems(args)
    problem = every[min(number, len(every) - 1)]
    if part == "peers":
        return quietest(problem, args)
    return (layer.run(problem, [], args.rounds) if part == "layer" else
            kernels.run(problem, args.rounds))


def _steps(args: argparse.Namespace) -> list[dict[str, str]]:
    """Return the results of the script's steps, with the last lines of output of failed ones."""
    logs = Path(args.out or ".") / "gpu_logs"
    told = logs / "steps.txt"
    lines = told.read_text("utf-8").splitlines() if told.exists() else []
    return [{"said": line, "end": "" if line.endswith(": passed") else _end(
        logs / f"{line.partition(':')[0]}.log")} for line in sorted(lines)]


def _end(path: Path) -> str:
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line for line in lines if not LEAKS.match(line)]
    return "\n".join(line[:200].replace("`", "'") for line in lines[-12:])


def _write_steps(found: list[dict[str, str]]) -> Iterator[str]:
    yield "The script runs each step in a separate process with a time limit, and logs the result:"
    yield "\n".join(["```text", *(one["said"] for one in found), "```"])
    for one in found:
        if one["end"]:
            yield f"This is the end of the output of the step \"{one['said']}\":"
            yield f"```text\n{one['end']}\n```"


class OneGPU:
    """Measure operations, and layers alone and with every installed peer, on one GPU. The script
    `scripts/bench_gpu.sh` measures each part in its own process.
    """

    TITLE, MADE_BY, OPTIONS = "One GPU", "bash scripts/bench_gpu.sh", AllLayers.OPTIONS
    PARTS = {
        **{f"{part}_{n}": (partial(_on_gpu, part, n), write) for part, write in (
            ("layer", OneLayer.body), ("peers", OneLayer.body),
            ("operations", OneProblemsOperations.body)) for n in range(3)},
        "steps": (_steps, _write_steps)}
