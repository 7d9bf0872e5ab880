"""Options for the links of an emulated cluster, which several commands share. Imports no torch."""

from __future__ import annotations

import argparse

from moe_plugin.planner.units import parse_rate, parse_time
from moe_plugin.utils.messages import short

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
