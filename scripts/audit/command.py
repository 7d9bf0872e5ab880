"""The command `moe-plugin audit`, which checks expert-parallel training steps."""

from __future__ import annotations

import argparse
import json
import math

from moe_plugin.utils.messages import short

MOST_RANKS = 64  # the largest number of processes on one machine

EXAMPLES = """examples:
  moe-plugin audit mine.py                 # build(ranks) and step(batch) of that file
  moe-plugin audit mine.py:Mine --ranks 1,2 --json
  moe-plugin audit plain transformers megatron deepspeed
"""


def audit_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin audit`."""
    from scripts.audit.run import TIMEOUT_S, TOLERANCE
    from scripts.audit.targets import TARGETS

    p.epilog, p.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    p.description = (
        "Runs training steps of a tiny model on gloo processes of this machine, and compares the\n"
        "loss, every gradient and the norm with a dense computation in float64. If something is\n"
        "wrong, the exit status is 1, and the output states the fault, its factor and its likely\n"
        "cause.")
    p.add_argument("targets", nargs="+", metavar="TARGET",
                   help="file.py, file.py:name, module or module:name that defines build(ranks) "
                        f"and step(batch), or one of {', '.join(TARGETS)}")
    p.add_argument("--ranks", default="1,2,4", metavar="A,B",
                   help="numbers of processes (default: %(default)s)")
    p.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S",
                   help="seconds after which a step counts as a hang (default: %(default)s)")
    p.add_argument("--tolerance", type=float, default=TOLERANCE, metavar="X",
                   help="largest relative error of a correct result (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object")


def audit(args: argparse.Namespace) -> int:
    """Audit every target. Return exit status 1 if a fault is found in any target."""
    from scripts.audit.report import lines
    from scripts.audit.targets import audit_named

    for name, value in (("timeout", args.timeout), ("tolerance", args.tolerance)):
        if not 0 < value < math.inf:
            raise ValueError(f"--{name} {value} must be a number > 0")
    audits = []
    for name in args.targets:
        audits.append(audit_named(name, _ranks(args.ranks), timeout_s=args.timeout,
                                  tolerance=args.tolerance))
        if not args.json:
            print(*lines(audits[-1]), sep="\n", flush=True)
    if args.json:
        print(json.dumps({"audits": [audited.as_json() for audited in audits]}, indent=2))
    return int(any(not audited.right for audited in audits))


def _ranks(words: str) -> list[int]:
    try:
        ranks = [int(word) for word in words.split(",")]
    except ValueError:
        ranks = []
    if not ranks or not 1 <= min(ranks) <= max(ranks) <= MOST_RANKS:
        raise ValueError(f"--ranks {short(words)} must be numbers in 1..{MOST_RANKS}, such as "
                         "1,2,4")
    return ranks
