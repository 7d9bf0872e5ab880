"""The commands `emulate` and `fault`, which both run a training program.

`emulate NxP -- COMMAND` runs the program on a cluster that is emulated with network namespaces on
this machine. `fault KIND -- COMMAND` runs the program, and injects a fault at a specified time.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from scripts.emulate.faults import Fault

EMULATIONS = """examples:
  moe-plugin emulate 2x2 -- fairseq-train DATA --user-dir moe_plugin --cpu --moe-all-to-all 2dh ...
  moe-plugin emulate 2x2 --rate 100mbit --delay 2ms -- \\
      -m moe_plugin.hosts.megatron.launch SCRIPT ...
  moe-plugin emulate 4x2 --max-restarts 1 -- train.py ...
  moe-plugin emulate 2x1 --plain -- sh -c 'hostname; echo $NODE_RANK of $NNODES'
"""
_REMEDIES = {
    "exchange": "; ranks exchange rows only if they share the experts (in Megatron: "
                "--expert-model-parallel-size above 1)",
    "save": "; set the program to save more often",
}
FAULTS = """examples:
  torchrun --nproc-per-node 2 --no-python moe-plugin fault kill --ranks 1 --step 5 -- \\
      fairseq-train DATA --user-dir moe_plugin --cpu ...
  torchrun --max-restarts 1 ... --no-python moe-plugin fault stall --seconds 3 --once -- \\
      -m moe_plugin.hosts.megatron.launch SCRIPT ...
  torchrun ... --no-python moe-plugin fault nan-gradient --step 4 -- train.py ...
"""


def emulate_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin emulate`."""
    from moe_plugin.cli.figures import add_links

    p.usage, p.epilog = "moe-plugin emulate NxP [options] -- COMMAND ...", EMULATIONS
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.description = ("Start torchrun on every node of a cluster of network namespaces on this "
                     "machine, and remove the cluster afterwards.\n"
                     "Needs Linux, and root or `unshare --user --map-root-user --net`.")
    p.add_argument("grid", metavar="NxP",
                   help="number of nodes x number of ranks per node, such as 2x2")
    add_links(p)
    p.add_argument("--max-restarts", type=int, default=0, metavar="N",
                   help="how often torchrun restarts all ranks after a rank has failed "
                        "(default: %(default)s)")
    p.add_argument("--plain", action="store_true",
                   help="run COMMAND once per node without torchrun, with MASTER_ADDR, "
                        "MASTER_PORT, NNODES, NODE_RANK and NPROC_PER_NODE in its environment")
    p.add_argument(
        "program", nargs="+", metavar="COMMAND",
        help="after `--`: script.py, -m module, or an installed command, with its arguments")


def emulate(args: argparse.Namespace) -> int:
    """Run the program on an emulated cluster. Return the exit status of the first node that fails,
    or 0.
    """
    from moe_plugin.cli.figures import links_of
    from moe_plugin.planner.units import parse_grid
    from scripts.emulate import EmulatedCluster
    from scripts.emulate.launch import start_plain, start_torchrun, wait

    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts {args.max_restarts} must be >= 0. For example, use 1")
    signal.signal(signal.SIGTERM, _terminated)
    with EmulatedCluster(*parse_grid(args.grid), **links_of(args)) as cluster:
        if args.plain:
            return wait(start_plain(cluster, args.program))
        return wait(start_torchrun(cluster, args.program, args.max_restarts))


def _terminated(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)  # an exception, so that `with` removes the cluster


def fault_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin fault`."""
    from scripts.emulate.faults import KINDS, PLACES, Fault

    p.usage = "moe-plugin fault KIND [options] -- COMMAND ..."
    p.epilog = FAULTS
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.description = (
        "Run a training program in this process, and inject a fault on the given ranks, in the\n"
        "given step and at the given place. Start the command on every rank with\n"
        "torchrun --no-python.\n\n"
        + "\n".join(f"  {name:<13} {text}" for name, text in KINDS.items()))
    p.add_argument("kind", metavar="KIND", choices=list(KINDS), help="see above")
    p.add_argument("--ranks", type=_ranks, default=(0,), metavar="A,B",
                   help="ranks on which the fault happens; all ranks of a node stand for the node "
                        "(default: 0)")
    p.add_argument("--step", type=int, default=1, metavar="N",
                   help="optimizer step in which the fault happens, counted from each start of "
                        "the program (default: %(default)s)")
    p.add_argument("--place", default="", choices=list(PLACES),
                   help="; ".join(f"{name}: {text}" for name, text in PLACES.items())
                        + " (default: forward)")
    p.add_argument("--once", action="store_true",
                   help="inject the fault only in torchrun's first start, not after a restart")
    p.add_argument("--seconds", type=float, default=0.0, metavar="S",
                   help="duration of stall and slow")
    p.add_argument("--bytes", type=int, default=Fault.bytes, metavar="N",
                   help="largest size of a file for disk-full (default: %(default)s)")
    p.add_argument("--bit", type=int, default=Fault.bit, metavar="N",
                   help="bit that bit-flip and wrong-product flip (default: %(default)s)")
    p.add_argument("program", nargs="+", metavar="COMMAND",
                   help="after `--`: script.py, -m module, or an installed Python command, with "
                        "its arguments")


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def fault(args: argparse.Namespace) -> int:
    """Run the program of `moe-plugin fault`, and return its exit status."""
    from scripts.emulate.faults import Fault
    from scripts.emulate.launch import installed

    program = installed(args.program)
    fault = Fault(args.kind, args.ranks, args.step, args.place, args.seconds, args.bytes, args.bit)
    rank, world = (int(os.environ.get(name, usual)) for name, usual in (("RANK", "0"),
                                                                       ("WORLD_SIZE", "1")))
    if rank == 0 and min(fault.ranks) >= world:
        _say(f"{fault.kind} happens on no rank: the given ranks are "
             f"{', '.join(map(str, fault.ranks))}, but the program's ranks are 0 to {world - 1}")
    again = args.once and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    armed = None if again else fault.arm(rank)
    try:
        _become(program)
    except Exception:
        traceback.print_exc()  # print the program's error as it would be printed without `fault`
        return 1
    finally:
        if armed is not None and not armed.happened_in:
            _say(f"{fault.kind} did not happen on rank {rank}: {_why(fault, armed.step - 1)}")
    return 0


def _why(fault: Fault, made: int) -> str:
    """Return the reason why the fault was not injected into a program that ran for `made` steps."""
    from scripts.emulate.faults import PLACES

    if made < fault.step:
        return (f"step {fault.step}, place {fault.place}, was not reached; the program ran {made} "
                "steps")
    return (f"place {fault.place} ({PLACES[fault.place]}) was not reached in steps {fault.step} "
            f"to {made}{_REMEDIES.get(fault.place, '')}")


def _say(what: str) -> None:
    print(f"moe-plugin fault: {what}", file=sys.stderr, flush=True)


def _become(program: list[str]) -> None:
    sys.modules.pop("scripts", None)  # the program may have a package of the same name
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")
