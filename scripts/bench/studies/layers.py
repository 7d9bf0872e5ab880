"""Studies of a layer, its peers and its operations: on one problem, and on all those of a page."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_plugin.cli import figures
from moe_plugin.planner.units import show_size, show_time
from scripts.bench import kernels, layer, plots
from scripts.bench.layer import LayerReport
from scripts.bench.measure import said
from scripts.bench.options import add_problem, problem_of
from scripts.bench.peers import peers
from scripts.bench.problem import Problem
from scripts.bench.study import Option, with_machine

log = logging.getLogger(__name__)
FEW = Problem(tokens=4096, model_dim=512, hidden_dim=2048, experts=8, top_k=2)
MANY = Problem(tokens=4096, model_dim=256, hidden_dim=512, experts=64, top_k=2)
# gated experts of as much work: two thirds of the inner width, in multiples of 32
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
TOO_LARGE_FOR_EINSUM = 1 << 31  # elements of T x E x C
GENERATED = 64  # tokens of a decoding batch
MOST_MIB = 20.0  # aim for the layer's memory beside its inputs
SMALL = {"tokens": 64, "model_dim": 16, "hidden_dim": 32, "experts": 4, "top_k": 1}
QUICK = {"tokens": 256, "model_dim": 64, "hidden_dim": 128}
QUICK_ROUNDS = 3
PROBLEMS = {
    "device": Option("cuda" if torch.cuda.is_available() else "cpu", "where", choices=LAYERS),
    "threads": Option(2, "CPU threads"), "rounds": Option(25, "timed rounds", quick=1),
}
ATTEMPTS = {"attempts": Option(3, "most attempts of a noisy measurement", quick=1)}


def problems(args: argparse.Namespace) -> list[Problem]:
    """All problems of a device; with `--quick` a small one. Sets the number of threads."""
    torch.set_num_threads(args.threads)
    every = LAYERS[args.device]
    return [replace(every[0], **SMALL)] if args.quick else every


def quietest(problem: Problem, args: argparse.Namespace, ranks: int = 1,
             forward_only: bool = False) -> dict[str, Any]:
    """Our layer and its peers, by the attempt with the least noise: median and minimum of the bound
    closest to each other. ranks: that share the experts and the threads.
    """
    slots = problem.tokens * problem.experts * (problem.rows // problem.experts)
    names = [n for n in peers.names()
             if n != "einsum" or ranks == 1 and slots < TOO_LARGE_FOR_EINSUM]
    log.info("%s: measuring %s", problem.label(), ", ".join(names))
    measure = partial(layer.on_ranks, ranks=ranks, threads=max(
        1, args.threads // ranks)) if ranks > 1 else partial(layer.run, forward_only=forward_only)
    found: list[LayerReport] = []
    while len(found) < args.attempts and not any(one.noise < 1.05 for one in found):
        found.append(measure(problem, names, args.rounds))
    return min(found, key=lambda one: one.noise).as_dict()


class OneLayer:
    """Forward and backward of one MoE layer and of every peer that is installed, with the same
    weights and input; outputs are checked to agree. The bound is the time of the experts' matmuls
    alone, in the same run.
    """

    TITLE = "One layer and its peers"

    @staticmethod
    def add_arguments(p: argparse.ArgumentParser) -> None:
        add_problem(p)
        p.add_argument("--peers", default="all",
                       help=f"all, none, or names with commas: {', '.join(peers.names())} "
                            "(default: all)")
        p.add_argument("--plot", metavar="FILE",
                       help="also draw time and memory of each candidate into FILE (.png or .svg)")

    @staticmethod
    def measure(args: argparse.Namespace) -> dict[str, Any]:
        problem, rounds = problem_of(args), args.rounds
        if args.quick:  # no larger than these
            sizes = {name: min(most, getattr(problem, name)) for name, most in QUICK.items()}
            problem, rounds = replace(problem, **sizes), min(QUICK_ROUNDS, rounds)
        if args.plot:
            figures.check_figure(args.plot)
        names = {"all": peers.names(), "none": []}.get(args.peers, args.peers.split(","))
        found = layer.run(problem, names, rounds)
        if args.plot:
            plots.layer_plot(found, args.plot)
        return found.as_dict()

    @staticmethod
    def body(found: dict[str, Any]) -> list[str]:
        return ["Our layer and its peers.", *layer.parts(found)]


# what Triton's bindings print at the end of a process that failed
LEAKS = re.compile(r"nanobind: |See https://nanobind\.| - (leaked |\.\.\. skipped)")
DRAWN = 4  # of the problems


def _draw(number: int, found: dict[str, Any], path: Path) -> None:
    shown = found.get("one_rank", [])
    if number < len(shown):
        plots.layer_plot(LayerReport.from_dict(shown[number]), str(path))


def _one_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [with_machine(quietest, problem, args) for problem in problems(args)]


def _two_ranks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Gated layers, which all peers of several ranks have; of a GPU, or with `--quick`, none."""
    return [with_machine(quietest, problem, args, 2) for problem in problems(args)
            if problem.gated and problem.device == "cpu" and not args.quick]


def _generated(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [with_machine(partial(quietest, forward_only=True),
                         replace(problem, tokens=min(GENERATED, problem.tokens)), args)
            for problem in problems(args) if problem.gated]


def aim_of(one: dict[str, Any]) -> float | None:
    """The ratio to the bound that is aimed at on one rank; None: there is no aim for this layer."""
    problem = Problem(**{f.name: one[f.name] for f in fields(Problem)})
    if problem not in LAYERS["cpu"]:
        return None
    few = problem.experts == FEW.experts
    if problem.gated:
        return 1.08 if few else 1.20
    return (1.02 if problem.dtype == "float32" else 1.06) if few else 1.18


def aims(found: list[dict[str, Any]]) -> Iterator[str]:
    """What is aimed at on one rank, and which of it is reached."""
    rows = [one for one in found if aim_of(one) is not None]
    if not rows:
        return
    def met(reached: bool) -> str:
        return "yes" if reached else "no"

    yield (f"Aims on one rank: a ratio to the bound for each layer, and at most {MOST_MIB:g} MiB "
           "beside its inputs.")
    yield figures.columns(rows, {
        "layer": lambda one: LayerReport.from_dict(one).problem.label(),
        "ratio": "{ratio_to_bound:.2f}", "aim": lambda one: f"{aim_of(one):.2f}",
        "met": lambda one: met(round(one["ratio_to_bound"], 2) <= (aim_of(one) or 0)),
        "MiB": "{peak_extra_mib:.1f}", "of MiB met": lambda one: met(
            one["peak_extra_mib"] <= MOST_MIB)})


def _each_layer(found: list[dict[str, Any]]) -> Iterator[str]:
    if not found:
        return
    yield said(found[0]["versions"])
    yield from aims(found)
    for number, one in enumerate(found):
        label, shown, _ = layer.parts(one)
        yield f"{label}. Load average {one['load'][0]:g}, {one['load'][1]:g}."
        yield shown
        if number < DRAWN:
            yield f"![Time and memory of every candidate](layer_{number}.svg)"
    yield _not_measured(found)


def _not_measured(found: list[dict[str, Any]]) -> str:
    reasons: dict[str, dict[str, None]] = {}
    for one in found:
        for name, reason in one["refused"].items():
            reasons.setdefault(name, {})[reason] = None
    return layer.not_measured({name: ", or ".join(every) for name, every in reasons.items()
                               if name in peers.names()})


def _one_table(title: str, found: list[dict[str, Any]]) -> Iterator[str]:
    """A row for each candidate, a column for each layer."""
    if not found:
        return
    layers = [LayerReport.from_dict(one) for one in found]
    loads = ", ".join(f"{one['load'][0]:g}" for one in found)
    names = dict.fromkeys(result.name for one in layers for result in one.results)
    yield f"## {title[0].upper()}{title[1:]}"
    yield said(found[0]["versions"])
    yield ("Median, its ratio to the bound, peak memory without the input. Threads of each rank: "
           f"{layers[0].threads}. Load average {loads}.")
    yield figures.columns(names, {title: "{0}"} | {
        one.problem.label(): partial(_cell, {r.name: r for r in one.results}) for one in layers})
    yield _not_measured(found)


def _cell(results: dict[str, layer.Result], name: str) -> str:
    if name not in results:
        return ""
    one = results[name]
    size = "?" if one.peak_extra_mib is None else show_size(one.peak_extra_mib * 2**20)
    return f"{show_time(one.median_ms / 1e3)}, {one.ratio_to_bound:.2f}, {size}"


class AllLayers:
    """Our layer and every peer that is installed, on all problems of the page: forward and backward
    on one rank and on two, and a forward pass of 64 tokens, as text is generated. The bound is the
    time of the experts' matmuls alone, one after the other, in the same run; several at a time, as
    ours compute in float32, may take less.
    """

    TITLE = "The layer and its peers"
    OPTIONS = PROBLEMS | ATTEMPTS
    PARTS = {
        "one_rank": (_one_rank, _each_layer),
        "two_ranks": (_two_ranks, partial(_one_table, "forward and backward on two ranks")),
        "generated": (_generated, partial(_one_table, "forward pass of 64 tokens"))}
    PLOTS = {f"layer_{number}.svg": partial(_draw, number) for number in range(DRAWN)}


class OneProblemsOperations:
    """Every operation of the layer at one layer's sizes: time of each implementation that runs
    here, and its bound, the larger of bytes over the measured copy bandwidth and FLOPs over the
    measured rate of one large matmul.
    """

    TITLE = "Operations of one layer"
    add_arguments = staticmethod(add_problem)

    @staticmethod
    def measure(args: argparse.Namespace) -> dict[str, Any]:
        return kernels.run(problem_of(args), args.rounds).as_dict()

    @staticmethod
    def body(found: dict[str, Any]) -> list[str]:
        return ["Operations, each with its bound.", *kernels.parts(found)]


class AllOperations(OneProblemsOperations):
    """Every operation of the layer on the first three problems of the page: time of each
    implementation that runs here, and its bound, the larger of bytes over the measured copy
    bandwidth and FLOPs over the measured rate of one large matmul.
    """

    TITLE = "Each operation and its bound"
    OPTIONS = PROBLEMS
    add_arguments = staticmethod(lambda p: None)

    @staticmethod
    def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
        return [kernels.run(one, args.rounds).as_dict() for one in problems(args)[:3]]

    @staticmethod
    def body(found: list[dict[str, Any]]) -> Iterator[str]:
        yield said(found[0]["versions"])
        for one in found:
            yield from kernels.parts(one)


class OneGPU:
    """Layers, alone and with every installed peer, and operations, on one GPU and one page. Each
    part may be measured in a process of its own: `bash scripts/bench_gpu.sh` does so.
    """

    TITLE, MADE_BY = "One GPU", "bash scripts/bench_gpu.sh"
    OPTIONS = AllLayers.OPTIONS

    @staticmethod
    def layer(number: int, args: argparse.Namespace) -> dict[str, Any]:
        return layer.run(_numbered(number, args), [], args.rounds).as_dict()

    @staticmethod
    def peers(number: int, args: argparse.Namespace) -> dict[str, Any]:
        return quietest(_numbered(number, args), args)

    @staticmethod
    def operations(number: int, args: argparse.Namespace) -> dict[str, Any]:
        return kernels.run(_numbered(number, args), args.rounds).as_dict()

    @staticmethod
    def steps(args: argparse.Namespace) -> list[dict[str, str]]:
        """What the script says of its steps, with the last lines of those that failed."""
        logs = Path(args.out or ".") / "gpu_logs"
        told = logs / "steps.txt"
        lines = told.read_text("utf-8").splitlines() if told.exists() else []
        return [{"said": line, "end": "" if line.endswith(": passed") else _end(
            logs / f"{line.partition(':')[0]}.log")} for line in sorted(lines)]

    @staticmethod
    def write_steps(found: list[dict[str, str]]) -> Iterator[str]:
        yield "Steps of the script, each a process with a limit, and what was checked."
        yield "\n".join(["```text", *(one["said"] for one in found), "```"])
        for one in found:
            if one["end"]:
                yield f"The end of what it printed: {one['said']}"
                yield f"```text\n{one['end']}\n```"


def _numbered(number: int, args: argparse.Namespace) -> Problem:
    every = problems(args)
    return every[min(number, len(every) - 1)]


def _end(path: Path) -> str:
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line for line in lines if not LEAKS.match(line)]
    return "\n".join(line[:200].replace("`", "'") for line in lines[-12:])


OneGPU.PARTS = {  # type: ignore[attr-defined]
    **{f"{name}_{n}": (partial(measure, n), write) for name, measure, write in (
        ("layer", OneGPU.layer, OneLayer.body), ("peers", OneGPU.peers, OneLayer.body),
        ("operations", OneGPU.operations, OneProblemsOperations.body)) for n in range(3)},
    "steps": (OneGPU.steps, OneGPU.write_steps)}


class Scaling:
    """Time and memory of our layer along tokens, experts and choices, around one problem."""

    TITLE = "How the layer scales"
    OPTIONS = PROBLEMS | {"points": Option(max(map(len, AXES.values())), "of an axis, at most",
                                           quick=1)}

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
                found.append({"axis": axis, **layer.run(problem, [], args.rounds).as_dict()})
        return found

    @staticmethod
    def body(found: list[dict[str, Any]]) -> list[str]:
        return [said(found[0]["versions"]), "![Time and memory along each axis](scaling.svg)",
                figures.columns(found, {
                    "axis": "{axis}", "value": lambda one: str(one[one["axis"]]),
                    "median ms": "{median_ms:.1f}", "bound ms": "{bound_ms:.1f}",
                    "peak MiB": lambda one: f"{one['peak_extra_mib'] or 0:.0f}"})]

    @staticmethod
    def draw(found: list[dict[str, Any]], path: Path) -> None:
        plots.scaling_plot([(one["axis"], LayerReport.from_dict(one)) for one in found], str(path))

    PLOTS = {"scaling.svg": draw}
