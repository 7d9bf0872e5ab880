"""Studies of a layer, its peers and its operations, on one problem and on all problems of a page.
"""

from __future__ import annotations

import argparse
import logging
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
from scripts.bench.options import add_problem, problem_of
from scripts.bench.peers import peers
from scripts.bench.problem import Problem
from scripts.bench.report import load_in_words, versions_in_words
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
QUICK = {"tokens": 256, "model_dim": 64, "hidden_dim": 128}
QUICK_ROUNDS = 3
PROBLEMS = {
    "device": Option("cuda" if torch.cuda.is_available() else "cpu", "device to measure on",
                     choices=LAYERS),
    "threads": Option(2, "number of CPU threads"),
    "rounds": Option(25, "number of timed rounds", quick=1),
}
ATTEMPTS = {"attempts": Option(3, "maximum number of attempts if a measurement is noisy", quick=1)}


def problems(args: argparse.Namespace) -> list[Problem]:
    """Set the number of threads, and return all problems of a device, or one small problem with
    --quick.
    """
    torch.set_num_threads(args.threads)
    every = LAYERS[args.device]
    return [replace(every[0], **SMALL)] if args.quick else every


def quietest(problem: Problem, args: argparse.Namespace, ranks: int = 1,
             forward_only: bool = False) -> dict[str, Any]:
    """Measure our layer and its peers, and return the attempt with the least noise.

    The noise is the ratio of the bound's median to its minimum.

    Args:
        problem: sizes of the layer.
        args: options of the study.
        ranks: number of ranks that share the experts and the threads.
        forward_only: whether to leave out the backward pass.
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
    """Measure forward and backward of one MoE layer and of every installed peer, with equal weights
    and
    equal input. The outputs are checked to agree. The bound is the time of the experts' matmuls
    alone,
    in the same run.
    """

    TITLE = "One layer and its peers"

    @staticmethod
    def add_arguments(p: argparse.ArgumentParser) -> None:
        add_problem(p)
        p.add_argument("--peers", default="all",
                       help="all, none, or names separated by commas from: "
                            f"{', '.join(peers.names())} (default: all)")
        p.add_argument("--plot", metavar="FILE",
                       help="also draw the time and memory of each candidate to this .png or .svg "
                            "file")

    @staticmethod
    def measure(args: argparse.Namespace) -> dict[str, Any]:
        problem, rounds = problem_of(args), args.rounds
        if args.quick:  # reduces sizes that are larger than these
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
        return ["The table compares our layer with other implementations of the same layer.",
                *layer.parts(found)]


DRAWN = 4  # number of problems with a plot


def _draw(number: int, found: dict[str, Any], path: Path) -> None:
    shown = found.get("one_rank", [])
    if number < len(shown):
        plots.layer_plot(LayerReport.from_dict(shown[number]), str(path))


def _one_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [with_machine(quietest, problem, args) for problem in problems(args)]


def _two_ranks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure gated layers, which all peers on several ranks support; only on CPU and without
    `--quick`.
    """
    return [with_machine(quietest, problem, args, 2) for problem in problems(args)
            if problem.gated and problem.device == "cpu" and not args.quick]


def _generated(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [with_machine(partial(quietest, forward_only=True),
                         replace(problem, tokens=min(GENERATED, problem.tokens)), args)
            for problem in problems(args) if problem.gated]


def aim_of(one: dict[str, Any]) -> float | None:
    """Return the aim for the ratio to the bound on one rank, or None if this layer has no aim."""
    problem = Problem(**{f.name: one[f.name] for f in fields(Problem)})
    if problem not in LAYERS["cpu"]:
        return None
    few = problem.experts == FEW.experts
    if problem.gated:
        return 1.08 if few else 1.20
    return (1.02 if problem.dtype == "float32" else 1.06) if few else 1.18


def aims(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the aims on one rank, and whether they are reached."""
    rows = [one for one in found if aim_of(one) is not None]
    if not rows:
        return
    def met(reached: bool) -> str:
        return "yes" if reached else "no"

    yield ("Each layer has two aims on one rank: a ratio to the bound, and a peak memory of at "
           f"most {MOST_MIB:g} MiB in addition to its inputs.")
    yield figures.columns(rows, {
        "layer": lambda one: LayerReport.from_dict(one).problem.label(),
        "ratio": "{ratio_to_bound:.2f}", "aim": lambda one: f"{aim_of(one):.2f}",
        "ratio reached": lambda one: met(round(one["ratio_to_bound"], 2) <= (aim_of(one) or 0)),
        "peak MiB": "{peak_extra_mib:.1f}", "memory reached": lambda one: met(
            one["peak_extra_mib"] <= MOST_MIB)})


def _each_layer(found: list[dict[str, Any]]) -> Iterator[str]:
    if not found:
        return
    yield ("This page compares the time and the memory of one MoE layer with other implementations "
           "of the same layer. All of them have equal weights and equal input, run alternately in "
           "the same process, and their outputs are checked to agree. The *GEMM bound* is the time "
           "of the experts' matmuls alone; a ratio is a time divided by that of the bound. "
           "[Benchmarks](../benchmarks.md#one-layer-and-its-peers) explains the columns and the "
           "names of the peers. A layer is described by T tokens of width D, the inner width F of "
           "an expert, E experts and k experts per token.")
    yield versions_in_words(found[0]["versions"])
    yield from aims(found)
    for number, one in enumerate(found):
        label, shown, _ = layer.parts(one)
        yield f"{label}. {load_in_words(one['load'])}"
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
    """Yield a table with a row for each candidate and a column for each layer."""
    if not found:
        return
    layers = [LayerReport.from_dict(one) for one in found]
    loads = ", ".join(f"{one['load'][0]:g}" for one in found)
    names = dict.fromkeys(result.name for one in layers for result in one.results)
    yield f"## {title[0].upper()}{title[1:]}"
    threads = f"{layers[0].threads} thread{'s' * (layers[0].threads > 1)}"
    yield (f"A cell shows the median time, its ratio to the bound, and the peak memory without the "
           f"input. Every rank has {threads}. {versions_in_words(found[0]['versions'])} The load "
           f"averages of the machine before each layer were {loads}.")
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
    """Measure our layer and every installed peer on all problems of the page: forward and backward
    on one
    rank and on two ranks, and a forward pass of 64 tokens, as in text generation. The bound is the
    time
    of the experts' matmuls alone, one after the other, in the same run. A layer that computes
    several
    matmuls at the same time, as ours does in float32, may be faster than the bound.
    """

    TITLE = "The layer and its peers"
    OPTIONS = PROBLEMS | ATTEMPTS
    PARTS = {
        "one_rank": (_one_rank, _each_layer),
        "two_ranks": (_two_ranks, partial(_one_table, "forward and backward on two ranks")),
        "generated": (_generated, partial(_one_table, "forward pass of 64 tokens"))}
    PLOTS = {f"layer_{number}.svg": partial(_draw, number) for number in range(DRAWN)}


class OneProblemsOperations:
    """Measure every operation of the layer at one layer's sizes: the time of each implementation
    that runs
    here, and its bound. The bound is the larger of bytes over the measured copy bandwidth and FLOPs
    over
    the measured rate of one large matmul.
    """

    TITLE = "Operations of one layer"
    add_arguments = staticmethod(add_problem)

    @staticmethod
    def measure(args: argparse.Namespace) -> dict[str, Any]:
        return kernels.run(problem_of(args), args.rounds).as_dict()

    @staticmethod
    def body(found: dict[str, Any]) -> list[str]:
        return ["The table compares the time of each operation with its bound.",
                *kernels.parts(found)]


class AllOperations(OneProblemsOperations):
    """Measure every operation of the layer on the first three problems of the page: the time of
    each
    implementation that runs here, and its bound. The bound is the larger of bytes over the measured
    copy
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
        yield ("This page shows the time of every operation of a layer. The *bound* is the larger "
               "of two times: the bytes that the operation must move over the bandwidth of a copy, "
               "and its FLOPs over the rate of a large matmul. Both rates are measured in the same "
               "run. A * marks the implementation that the layer chooses. A layer is described by "
               "T tokens of width D, the inner width F of an expert, E experts and k experts per "
               "token.")
        yield versions_in_words(found[0]["versions"])
        for one in found:
            yield from kernels.parts(one)


class Scaling:
    """Measure the time and memory of our layer over the numbers of tokens, of experts and of
    experts per
    token, around one problem.
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
                found.append({"axis": axis, **layer.run(problem, [], args.rounds).as_dict()})
        return found

    @staticmethod
    def body(found: list[dict[str, Any]]) -> list[str]:
        fixed = LayerReport.from_dict(found[0]).problem
        return [("This page shows how the time and memory of forward and backward grow with the "
                 "number of tokens, of experts, and of experts per token (top_k). One of them "
                 "changes, and the others stay at 4,096 tokens, 64 experts and 2 experts per "
                 f"token. The width is {fixed.model_dim} and the inner width {fixed.hidden_dim}. "
                 "The bound is the time of the experts' matmuls alone."),
                versions_in_words(found[0]["versions"]),
                "![Time and memory along each axis](scaling.svg)",
                figures.columns(found, {
                    "axis": "{axis}", "value": lambda one: str(one[one["axis"]]),
                    "median ms": "{median_ms:.1f}", "bound ms": "{bound_ms:.1f}",
                    "peak MiB": lambda one: f"{one['peak_extra_mib'] or 0:.0f}"})]

    @staticmethod
    def draw(found: list[dict[str, Any]], path: Path) -> None:
        plots.scaling_plot([(one["axis"], LayerReport.from_dict(one)) for one in found], str(path))

    PLOTS = {"scaling.svg": draw}
