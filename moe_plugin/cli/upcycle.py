"""`moe-plugin upcycle`: a dense checkpoint becomes a Mixture of Experts."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = (
        "Turns the MLPs of a dense checkpoint into experts that compute the same at first: copies, "
        "or with --granularity G pieces of it. Optimizer state is left out.")
    p.add_argument("source", type=Path, metavar="IN", help="dense checkpoint, of any format")
    p.add_argument("target", type=Path, metavar="OUT", help="folder to write; must not exist")
    p.add_argument("--experts", type=int, required=True, metavar="E",
                   help="experts of each MoE layer, a multiple of G")
    p.add_argument("--top-k", type=int, required=True, metavar="K",
                   help="experts per token, at least 2 and a multiple of G")
    p.add_argument("--granularity", type=int, default=1, metavar="G",
                   help="cut each MLP into G experts along its inner width (default: 1, copies)")
    p.add_argument("--shared", type=float, default=0.0, metavar="SHARE",
                   help="share of the MLP's output that a shared expert gives, from 0 to below 1 "
                        "(default: 0, none)")
    p.add_argument("--shared-gate", action="store_true",
                   help="give the shared expert a gate, as Qwen2-MoE has it")
    p.add_argument("--every", type=int, default=1, metavar="N",
                   help="make every Nth layer an MoE layer (default: 1, all)")
    p.add_argument("--router-std", type=float, default=0.02, metavar="STD",
                   help="standard deviation of the routers' initial weights (default: 0.02)")
    p.add_argument("--seed", type=int, default=0, help="of the routers (default: 0)")
    p.add_argument("--from", dest="origin", default=None, metavar="FORMAT",
                   help="format of IN (default: detected)")
    p.add_argument("--to", default=None, metavar="FORMAT", help="format of OUT (default: IN's)")
    p.add_argument("--trust-checkpoint", action="store_true",
                   help="unpickle classes that are not listed, which can run code in IN")


def run(args: argparse.Namespace) -> int:
    """Convert; print what was made."""
    from moe_plugin.checkpoint.formats.all import formats
    from moe_plugin.checkpoint.formats.base import convert, detect, open_source
    from moe_plugin.checkpoint.neutral import NEUTRAL
    from moe_plugin.checkpoint.upcycle import Upcycling, upcycle, write_new

    plan = Upcycling(experts=args.experts, top_k=args.top_k, granularity=args.granularity,
                     shared=args.shared, shared_gate=args.shared_gate, every=args.every,
                     router_std=args.router_std, seed=args.seed)
    name = args.origin or detect(args.source)
    to = formats.get(args.to or name)()
    with open_source(args.source, name, args.trust_checkpoint) as source:
        made = upcycle(convert(source, NEUTRAL), plan)
        write_new(convert(made, to.name), to, args.target)
    print(f"{args.target}: {len(made.layers)} MoE layers of {plan.experts} experts, "
          f"{plan.top_k} per token, format {to.name}")
    return 0
