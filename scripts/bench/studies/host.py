"""Processor time and ATen operations of one layer call on tiny tensors, ours beside Megatron-core's
own layer, the einsum form and a dense FFN. Starts its ranks itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from scripts.bench import host
from scripts.bench.measure import said
from scripts.bench.options import add_problem, problem_of

TITLE = "What a layer costs the host"
ABOUT = """Processor time of one call on tiny tensors, forward, and forward and backward, and the
ATen operations that it launches, views included: what a layer costs the host on any device
computes. Equal weights and tokens, outputs compared; candidates alternate, ten calls at a time, in
the same process. Times are medians of the rounds on rank 0, `least` is the smallest; with several
ranks they hold the work of gloo's threads, and no waiting. Megatron-core's layer runs on a CPU
with patches, of which the one that looks at every call of torch is off while calls are measured.
`dense` has no router and computes something else."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    add_problem(p)
    p.set_defaults(tokens=16, model_dim=32, hidden_dim=64, threads=1, rounds=40)
    p.add_argument("--ranks", default="1,2", metavar="LIST",
                   help="expert-parallel ranks, with commas (default: %(default)s)")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    problem, rounds = problem_of(args), 3 if args.quick else args.rounds
    return [host.run(replace(problem, gated=gated), ranks, rounds).as_dict()
            for gated in sorted({problem.gated, True}) for ranks in _ranks(args.ranks)]


def body(found: list[dict[str, Any]]) -> Iterator[str]:
    yield said(found[0]["versions"])
    yield ABOUT
    for one in found:
        yield from host.parts(one)


def _ranks(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--ranks {text[:40]!r} must be numbers with commas, e.g. 1,2") from error
    if any(not 1 <= ranks <= 64 for ranks in found):
        raise ValueError(f"--ranks {text[:40]!r} is out of bounds: must be from 1 to 64; e.g. 1,2")
    return found
