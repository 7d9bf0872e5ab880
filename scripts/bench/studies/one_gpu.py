"""Measure operations, and layers alone and with every installed peer, on one GPU. The script
`scripts/bench_gpu.sh` measures each part in its own process.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench import kernels, layer
from scripts.bench.studies import layers

TITLE, MADE_BY, OPTIONS = "One GPU", "bash scripts/bench_gpu.sh", layers.AllLayers.OPTIONS
# lines that Triton's bindings print at the end of a process that failed
LEAKS = re.compile(r"nanobind: |See https://nanobind\.| - (leaked |\.\.\. skipped)")


def measure(part: str, number: int, args: argparse.Namespace) -> dict[str, Any]:
    every = layers.problems(args)
    problem = every[min(number, len(every) - 1)]
    if part == "peers":
        return layers.quietest(problem, args)
    return (layer.run(problem, [], args.rounds) if part == "layer" else
            kernels.run(problem, args.rounds))


def steps(args: argparse.Namespace) -> list[dict[str, str]]:
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


def write_steps(found: list[dict[str, str]]) -> Iterator[str]:
    yield "The script runs each step in a separate process with a time limit, and logs the result:"
    yield "\n".join(["```text", *(one["said"] for one in found), "```"])
    for one in found:
        if one["end"]:
            yield f"This is the end of the output of the step \"{one['said']}\":"
            yield f"```text\n{one['end']}\n```"


PARTS = {
    **{f"{part}_{n}": (partial(measure, part, n), write) for part, write in (
        ("layer", layers.OneLayer.body), ("peers", layers.OneLayer.body),
        ("operations", layers.OneProblemsOperations.body)) for n in range(3)},
    "steps": (steps, write_steps)}
