"""Options that several commands share, and the records that they describe. Imports no torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from moe_plugin.messages import short
from moe_plugin.planner.units import parse_rate, parse_time

if TYPE_CHECKING:
    from moe_plugin.lab.bench.problem import Problem


_LINKS = {"rate": "200mbit", "delay": "1ms", "message_cost": "0us"}


def add_links(p: argparse.ArgumentParser) -> None:
    """Options for the links of an emulated cluster, read by `links_of`."""
    for name, metavar, text in (
            ("rate", "RATE", "rate of an emulated node's link"),
            ("delay", "TIME", "one-way delay between emulated nodes"),
            ("message_cost", "TIME", "extra time per message of an emulated node's network card")):
        # no default: `refuse_links` must know what was given
        p.add_argument(f"--{name.replace('_', '-')}", metavar=metavar,
                       help=f"{text} (default: {_LINKS[name]})")


def links_of(args: argparse.Namespace) -> dict[str, float]:
    """Keyword arguments of `EmulatedCluster`: bit/s and seconds."""
    rate, delay, cost = (usual if (given := getattr(args, name)) is None else given
                         for name, usual in _LINKS.items())
    return {"rate_bit_s": parse_rate(rate), "delay_s": parse_time(delay),
            "message_s": parse_time(cost)}


def refuse_links(args: argparse.Namespace) -> None:
    """`ValueError` where options for emulated links are given and no cluster is emulated."""
    for name in _LINKS:
        if (given := getattr(args, name)) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {short(given)} is of an emulated link, "
                             "and no cluster is emulated: add --emulate, e.g. --emulate 2x2, or "
                             "leave it out")


def add_exchange_sizes(p: argparse.ArgumentParser, sizes: str) -> None:
    """Options that say where and how to measure an all-to-all. sizes: the default of `--sizes`."""
    p.add_argument(
        "--emulate", metavar="NxP",
        help="nodes x ranks per node of an emulated cluster, e.g. 8x4; several with commas")
    add_links(p)
    p.add_argument("--sizes", default=sizes, metavar="LIST",
                   help="bytes per rank (default: %(default)s)")
    p.add_argument("--repeats", type=int, default=7,
                   help="timed repeats of each cell (default: %(default)s)")


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

    from moe_plugin.lab.bench.problem import Problem

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
