"""`moe-plugin bench host`: processor time and operations of one call of a tiny layer."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from moe_plugin.cli.options import add_problem, problem_of

ABOUT = """Processor time of one call on tiny tensors, forward, and forward and backward, and the
ATen operations that it launches, views included: what a layer costs the host whatever the device
computes. Equal weights and tokens, outputs compared; candidates alternate, ten calls at a time, in
the same process. Times are medians of the rounds on rank 0, `least` is the smallest; with several
ranks they hold the work of gloo's threads, and no waiting. Megatron-core's layer runs on a CPU
with patches, of which the one that looks at every call of torch is off while calls are measured.
`dense` has no router and computes something else."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Processor time and ATen operations of one layer call on tiny tensors, ours "
                     "beside Megatron-core's own layer, the einsum form and a dense FFN. Starts "
                     "its ranks itself.")
    add_problem(p)
    p.set_defaults(tokens=16, model_dim=32, hidden_dim=64, threads=1, rounds=40)
    p.add_argument("--ranks", default="1,2", metavar="LIST",
                   help="expert-parallel ranks, with commas (default: %(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE",
                   help="also write a JSON file, and a page of the same name (.md) beside it")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    from moe_plugin.lab.bench import host, report
    from moe_plugin.regular_files import check_output

    for path in (args.out, args.out.with_suffix(".md")) if args.out else ():
        check_output(path)
    problem, found = problem_of(args), []
    for ranks in _ranks(args.ranks):
        found.append(host.run(problem, ranks, args.rounds))
    text = "\n\n".join(map(report.host_table, found))
    every = [one.as_dict() for one in found]
    sys.stdout.write((json.dumps(every, indent=1) if args.json else text) + "\n")
    if args.out:
        report.write_json(args.out, every)
        about = report.paragraph(" ".join(ABOUT.split()))
        report.write_page(args.out.with_suffix(".md"), "What a layer costs the host",
                          f"moe-plugin bench host --out {args.out}", found[0].versions,
                          f"{about}\n\n{text}")
    return 0


def _ranks(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--ranks {text[:40]!r} must be numbers with commas, e.g. 1,2") from error
    if any(not 1 <= ranks <= 64 for ranks in found):
        raise ValueError(f"--ranks {text[:40]!r} is out of bounds: must be from 1 to 64; e.g. 1,2")
    return found
