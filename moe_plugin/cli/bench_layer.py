"""`moe-plugin bench layer`: our layer beside its peers."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_plugin.bench.problem import Problem


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `layer` to `bench`."""
    p = commands.add_parser(
        "layer", help="our layer beside its peers: time, ratio to the GEMM bound, memory",
        description=
        "Forward and backward of one MoE layer beside every peer that is installed, with the same "
        "weights and input; outputs are "
        "checked to agree. The bound is the time of the experts' matrix products alone, in the "
        "same run."
    )
    add_sizes(p)
    p.add_argument(
        "--peers", default="all", help=
        "all, none, or names with commas: einsum, megatron, deepspeed, megablocks, dense (default: "
        "all)"
    )
    p.add_argument("--plot", metavar="FILE",
                   help="also draw time and memory of each candidate into FILE (.png or .svg)")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from moe_plugin.bench import layer, report
    from moe_plugin.bench.peers import peers

    problem = problem_of(args)
    names = {"all": peers.names(), "none": []}.get(args.peers, args.peers.split(","))
    found = layer.run(problem, names, args.rounds)
    sys.stdout.write(
        json.dumps(found.as_dict(), indent=1) + "\n" if args.json else report.layer_table(found) +
        "\n")
    if args.plot:
        report.layer_plot(found, args.plot)
    return 0


def add_sizes(p: argparse.ArgumentParser) -> None:
    """The options of a `Problem` and of how it is measured, shared by the parts of `bench`."""
    for name, default, text in (("tokens", 4096, "tokens"), ("model-dim", 512, "width of a token"),
                                ("hidden-dim", 2048, "inner width of an expert"),
                                ("experts", 8, "experts"), ("top-k", 2, "experts a token")):
        p.add_argument(f"--{name}", type=int, default=default,
                       help=f"{text} (default: %(default)s)")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    p.add_argument("--gated", action="store_true",
                   help="gated experts (SwiGLU) instead of two linear maps")
    p.add_argument("--device", default=None, choices=("cpu", "cuda"),
                   help="default: cuda where there is one")
    p.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's)")
    p.add_argument("--rounds", type=int, default=15,
                   help="timed rounds, each candidate once a round (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem that the options describe; sets torch's threads."""
    import torch

    from moe_plugin.bench.problem import Problem

    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(
                f"threads={args.threads} is out of bounds: must be >= 1; leave --threads out for "
                "torch's number"
            )
        torch.set_num_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Problem(tokens=args.tokens, model_dim=args.model_dim, hidden_dim=args.hidden_dim,
                   experts=args.experts, top_k=args.top_k, dtype=args.dtype, gated=args.gated,
                   device=device)
