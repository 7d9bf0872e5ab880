"""Measure layers, peers and operations on one GPU. The page contains the results of the script
`scripts/bench_gpu.sh`, which performs the measurements.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench import kernels, layer
from scripts.bench.problem import Problem
from scripts.bench.studies.layers import (
    AllLayers,
    OneLayer,
    OneProblemsOperations,
    problems,
    quietest,
)

# lines that Triton's bindings print at the end of a process that failed
LEAKS = re.compile(r"nanobind: |See https://nanobind\.| - (leaked |\.\.\. skipped)")


class OneGPU:
    """Measure operations, and layers alone and with every installed peer, on one GPU. The script
    `scripts/bench_gpu.sh` measures each part in its own process.
    """

    TITLE, MADE_BY = "One GPU", "bash scripts/bench_gpu.sh"
    OPTIONS = AllLayers.OPTIONS

    @staticmethod
    def layer(number: int, args: argparse.Namespace) -> dict[str, Any]:
        return layer.run(_numbered(number, args), [], args.rounds)

    @staticmethod
    def peers(number: int, args: argparse.Namespace) -> dict[str, Any]:
        return quietest(_numbered(number, args), args)

    @staticmethod
    def operations(number: int, args: argparse.Namespace) -> dict[str, Any]:
        return kernels.run(_numbered(number, args), args.rounds)

    @staticmethod
    def steps(args: argparse.Namespace) -> list[dict[str, str]]:
        """Return the results of the script's steps, with the last lines of output of failed ones.
        """
        logs = Path(args.out or ".") / "gpu_logs"
        told = logs / "steps.txt"
        lines = told.read_text("utf-8").splitlines() if told.exists() else []
        return [{"said": line, "end": "" if line.endswith(": passed") else _end(
            logs / f"{line.partition(':')[0]}.log")} for line in sorted(lines)]

    @staticmethod
    def write_steps(found: list[dict[str, str]]) -> Iterator[str]:
        yield ("The script runs each step in a separate process with a time limit, and logs the "
               "result:")
        yield "\n".join(["```text", *(one["said"] for one in found), "```"])
        for one in found:
            if one["end"]:
                yield f"This is the end of the output of the step \"{one['said']}\":"
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
