"""`moe-plugin emulate 2x2 -- COMMAND`: any training command on a cluster of network namespaces on
this machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import NoReturn

EXAMPLES = """examples:
  moe-plugin emulate 2x2 -- fairseq-train DATA --user-dir moe_plugin --cpu --moe-all-to-all 2dh ...
  moe-plugin emulate 2x2 --rate 100mbit --delay 2ms -- -m moe_plugin.hosts.megatron.train --data-path DATA ...
  moe-plugin emulate 4x2 --max-restarts 1 -- train.py ...
  moe-plugin emulate 2x1 --plain -- sh -c 'hostname; echo $NODE_RANK of $NNODES'
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `emulate`."""
    p = commands.add_parser(
        "emulate", help="run any training command on an emulated cluster",
        usage="moe-plugin emulate NxP [options] -- COMMAND ...", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter, description=
        "Starts torchrun on every node of a cluster of network namespaces on this machine, and "
        "takes it down afterwards.\n"
        "Linux; root, or inside `unshare --user --map-root-user --net`.")
    p.add_argument("grid", metavar="NxP", help="nodes x ranks a node, e.g. 2x2")
    p.add_argument("--rate", default="200mbit", help="rate of a node's link (default: %(default)s)")
    p.add_argument("--delay", default="1ms",
                   help="one-way delay between nodes (default: %(default)s)")
    p.add_argument("--message-cost", default="0us", metavar="TIME",
                   help="extra time a message of a node's card (default: %(default)s)")
    p.add_argument("--max-restarts", type=int, default=0, metavar="N",
                   help="torchrun's: all ranks start again after one failed (default: %(default)s)")
    p.add_argument(
        "--plain", action="store_true", help=
        "run COMMAND itself once a node, without torchrun; it is told MASTER_ADDR, MASTER_PORT, "
        "NNODES, "
        "NODE_RANK and NPROC_PER_NODE")
    p.add_argument(
        "program", nargs="+", metavar="COMMAND",
        help="after `--`: script.py, -m module, or an installed command, with its arguments")


def run(args: argparse.Namespace) -> int:
    """Run it; the exit status of the first node that fails, else 0."""
    from moe_plugin.emulate import EmulatedCluster
    from moe_plugin.emulate.launch import start_plain, start_torchrun, wait
    from moe_plugin.planner.units import parse_grid, parse_rate, parse_time

    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts {args.max_restarts} must be >= 0; e.g. 1")
    links = {
        "rate_bit_s": parse_rate(args.rate), "delay_s": parse_time(args.delay),
        "message_s": parse_time(args.message_cost)
    }
    signal.signal(signal.SIGTERM, _terminated)
    with EmulatedCluster(*parse_grid(args.grid), **links) as cluster:
        return wait(
            start_plain(cluster, args.program) if args.
            plain else start_torchrun(cluster, args.program, args.max_restarts))


def _terminated(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)  # an exception, so that the cluster is taken down in order
