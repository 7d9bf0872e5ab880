"""The problems of the pages of layers, operations and scaling, and their measurements."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from moe_plugin.lab.bench import layer
from moe_plugin.lab.bench.layer import LayerReport
from moe_plugin.lab.bench.peers import peers
from moe_plugin.lab.bench.problem import Problem
from moe_plugin.lab.bench.study import Option

logger = logging.getLogger(__name__)
FEW = Problem(tokens=4096, model_dim=512, hidden_dim=2048, experts=8, top_k=2)
MANY = Problem(tokens=4096, model_dim=256, hidden_dim=512, experts=64, top_k=2)
LAYERS = {
    "cpu": [FEW, MANY, replace(FEW, dtype="bfloat16"), replace(MANY, dtype="bfloat16")],
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


def quietest(measure: Callable[[], LayerReport], attempts: int) -> LayerReport:
    """The attempt with the least noise: median and minimum of the bound closest to each other."""
    best: LayerReport | None = None
    for _ in range(attempts):
        found = measure()
        if best is None or found.bound_ms / found.bound_min_ms < best.bound_ms / best.bound_min_ms:
            best = found
        if best.bound_ms / best.bound_min_ms < 1.05:
            break
    return best


def layers(problems: Sequence[Problem], rounds: int, attempts: int) -> Iterator[LayerReport]:
    """Our layer and its peers on each problem."""
    for problem in problems:
        slots = problem.rows // problem.experts
        names = [
            n for n in peers.names()
            if n != "einsum" or problem.tokens * problem.experts * slots < TOO_LARGE_FOR_EINSUM
        ]
        logger.info("%s: measuring %s", problem.label(), ", ".join(names))
        yield quietest(lambda problem=problem, names=names: layer.run(problem, names, rounds),
                      attempts)


def scaling(device: str, rounds: int, points: int) -> Iterator[tuple[str, LayerReport]]:
    """(axis, report) along tokens, experts and choices around one problem, ours alone.

    points: of an axis, at most.
    """
    base = LAYERS[device][1] if device == "cpu" else replace(LAYERS[device][2], tokens=16384)
    scale = base.tokens // 4096
    for axis, values in AXES.items():
        for value in values[:points]:
            problem = replace(base, **{axis: value * scale if axis == "tokens" else value})
            logger.info("scaling: %s", problem.label())
            yield axis, layer.run(problem, [], rounds)


OPTIONS = {
    "device": Option("cuda" if torch.cuda.is_available() else "cpu", "where", choices=LAYERS),
    "threads": Option(2, "CPU threads"), "rounds": Option(25, "timed rounds", quick=1),
    "attempts": Option(3, "most attempts of a noisy measurement", quick=1),
}
SMALL = {"tokens": 64, "model_dim": 16, "hidden_dim": 32, "experts": 4, "top_k": 1}


def problems(args: argparse.Namespace) -> list[Problem]:
    """All problems of a device; with `--quick` a small one. Sets the number of threads."""
    torch.set_num_threads(args.threads)
    every = LAYERS[args.device]
    return [replace(every[0], **SMALL)] if args.quick else every
