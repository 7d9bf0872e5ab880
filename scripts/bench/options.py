"""Options for a problem that several studies share. Imports no torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from moe_plugin.utils.messages import short

if TYPE_CHECKING:
    from scripts.bench.problem import Problem


def add_problem(p: argparse.ArgumentParser) -> None:
    """Options for a `Problem` and for how it is measured, read by `problem_of`."""
    for name, default, text in (("tokens", 4096, "tokens"), ("model-dim", 512, "width of a token"),
                                ("hidden-dim", 2048, "inner width of an expert"),
                                ("experts", 8, "experts"), ("top-k", 2, "experts per token")):
        p.add_argument(f"--{name}", type=int, default=default,
                       help=f"{text} (default: %(default)s)")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    p.add_argument("--gated", action="store_true",
                   help="gated experts (SwiGLU) instead of two linear maps")
    p.add_argument("--device", default=None, choices=("cpu", "cuda"),
                   help="default: cuda where there is one")
    p.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's)")
    p.add_argument("--rounds", type=int, default=15,
                   help="timed rounds, each candidate once per round (default: %(default)s)")


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem that the options describe; sets the number of torch's threads."""
    import torch

    from scripts.bench.problem import Problem

    if args.threads is not None:
        if not 1 <= args.threads <= 4096:
            raise ValueError(f"threads={short(args.threads)} is out of bounds: must be from 1 to "
                             "4096; leave --threads out for torch's number")
        torch.set_num_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.rounds < 1:
        raise ValueError(f"rounds={short(args.rounds)} is out of bounds: must be >= 1; use 15")
    problem = Problem(tokens=args.tokens, model_dim=args.model_dim, hidden_dim=args.hidden_dim,
                      experts=args.experts, top_k=args.top_k, dtype=args.dtype, gated=args.gated,
                      device=device)
    problem.check_device()
    return problem
