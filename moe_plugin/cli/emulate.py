"""`moe-plugin emulate 2x2 -- COMMAND`: any training command on a cluster of network namespaces on
this machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import NoReturn

from moe_plugin.lab.bench.options import add_links, links_of

EXAMPLES = """examples:
  moe-plugin emulate 2x2 -- fairseq-train DATA --user-dir moe_plugin --cpu --moe-all-to-all 2dh ...
  moe-plugin emulate 2x2 --rate 100mbit --delay 2ms -- -m moe_plugin.hosts.megatron.train ...
  moe-plugin emulate 4x2 --max-restarts 1 -- train.py ...
  moe-plugin emulate 2x1 --plain -- sh -c 'hostname; echo $NODE_RANK of $NNODES'
"""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.usage, p.epilog = "moe-plugin emulate NxP [options] -- COMMAND ...", EXAMPLES
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.description = ("Starts torchrun on every node of a cluster of network namespaces on this "
                     "machine, and removes it afterwards.\n"
                     "Linux; root, or inside `unshare --user --map-root-user --net`.")
    p.add_argument("grid", metavar="NxP", help="nodes x ranks per node, e.g. 2x2")
    add_links(p)
    p.add_argument("--max-restarts", type=int, default=0, metavar="N",
                   help="torchrun's: all ranks start again after one failed (default: %(default)s)")
    p.add_argument("--plain", action="store_true",
                   help="run COMMAND itself once per node, without torchrun, with MASTER_ADDR, "
                        "MASTER_PORT, NNODES, NODE_RANK and NPROC_PER_NODE in its environment")
    p.add_argument(
        "program", nargs="+", metavar="COMMAND",
        help="after `--`: script.py, -m module, or an installed command, with its arguments")


def run(args: argparse.Namespace) -> int:
    """Run it; the exit status of the first node that fails, else 0."""
    from moe_plugin.lab.emulate import EmulatedCluster
    from moe_plugin.lab.emulate.launch import start_plain, start_torchrun, wait
    from moe_plugin.planner.units import parse_grid

    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts {args.max_restarts} must be >= 0; e.g. 1")
    signal.signal(signal.SIGTERM, _terminated)
    with EmulatedCluster(*parse_grid(args.grid), **links_of(args)) as cluster:
        if args.plain:
            return wait(start_plain(cluster, args.program))
        return wait(start_torchrun(cluster, args.program, args.max_restarts))


def _terminated(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)  # an exception, so that the cluster is removed in order
