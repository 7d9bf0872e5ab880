"""Options of a layer's sizes, shared by several studies. This module does not import torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from moe_plugin.utils.messages import short

if TYPE_CHECKING:
    from scripts.bench.problem import Problem


def add_problem(p: argparse.ArgumentParser) -> None:
    """Add the options of a `Problem` and of its measurement, which `problem_of` reads."""
    for name, default, text in (("tokens", 4096, "number of tokens"),
                                ("model-dim", 512, "width of a token"),
                                ("hidden-dim", 2048, "inner width of an expert"),
                                ("experts", 8, "number of experts"),
                                ("top-k", 2, "number of experts per token")):
        p.add_argument(f"--{name}", type=int, default=default,
                       help=f"{text} (default: %(default)s)")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    p.add_argument("--gated", action="store_true",
                   help="use gated experts (SwiGLU) instead of two linear maps")
    p.add_argument("--device", default=None, choices=("cpu", "cuda"),
                   help="device to measure on (default: cuda if torch sees a GPU)")
    p.add_argument("--threads", type=int, default=None,
                   help="number of CPU threads (default: torch's number)")
    p.add_argument("--rounds", type=int, default=15,
                   help="number of timed rounds, in which each candidate runs once (default: "
                        "%(default)s)")


def problem_of(args: argparse.Namespace) -> Problem:
    """Return the problem that the options describe, and set the number of torch's threads.

    Raises:
        ValueError: if a number is out of bounds or the device cannot run the problem.
    """
    import torch

    from scripts.bench.problem import Problem

    if args.threads is not None:
        if not 1 <= args.threads <= 4096:
            raise ValueError(f"threads={short(args.threads)} is out of bounds: must be from 1 to "
                             "4096. Leave out --threads for torch's number")
        torch.set_num_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.rounds < 1:
        raise ValueError(f"rounds={short(args.rounds)} is out of bounds: must be >= 1. Use, for "
                         "example, 15")
    problem = Problem(tokens=args.tokens, model_dim=args.model_dim, hidden_dim=args.hidden_dim,
                      experts=args.experts, top_k=args.top_k, dtype=args.dtype, gated=args.gated,
                      device=device)
    problem.check_device()
    return problem
