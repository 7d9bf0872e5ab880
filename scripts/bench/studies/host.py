"""Measure processor time and ATen operations of one layer call on tiny tensors, for our layer,
Megatron-core's own layer and other peers. Starts its ranks itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from scripts.bench import host
from scripts.bench.options import add_problem, problem_of
from scripts.bench.report import versions_in_words

TITLE = "Host cost of a layer"
ABOUT = """This page shows how much work a layer call causes on the host. On tiny tensors, nearly
all time is spent in Python, dispatch and autograd, and a host needs the same time to launch a layer
on any device. The tables show the processor time of a forward pass and of forward and backward, and
the number of ATen operations, including views. All layers have equal weights and equal tokens, and
their outputs are checked to agree. The layers alternate in the same process, with ten calls each.
Times are medians over rounds on rank 0, and *minimum* is the fastest round of forward and backward.
With several ranks, the processor time includes the work of gloo's threads but no waiting.
Megatron-core's layer runs on a CPU with patches. The patch that intercepts every call of torch is
disabled while calls are measured. `dense` has no router and computes a different function. A layer
is described by T tokens of width D, the inner width F of an expert, E experts and k experts per
token."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    add_problem(p)
    p.set_defaults(tokens=16, model_dim=32, hidden_dim=64, threads=1, rounds=40)
    p.add_argument("--ranks", default="1,2", metavar="LIST",
                   help="numbers of expert-parallel ranks, separated by commas (default: "
                        "%(default)s)")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    problem, rounds = problem_of(args), 3 if args.quick else args.rounds
    return [host.run(replace(problem, gated=gated), ranks, rounds).as_dict()
            for gated in sorted({problem.gated, True}) for ranks in _ranks(args.ranks)]


def body(found: list[dict[str, Any]]) -> Iterator[str]:
    yield ABOUT
    yield versions_in_words(found[0]["versions"])
    for one in found:
        yield from host.parts(one)


def _ranks(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--ranks {text[:40]!r} must be numbers separated by commas, such as "
                         "1,2") from error
    if any(not 1 <= ranks <= 64 for ranks in found):
        raise ValueError(f"--ranks {text[:40]!r} is out of bounds: must be from 1 to 64, such as "
                         "1,2")
    return found
