"""The command `moe-plugin audit`, which checks expert-parallel training steps."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moe_plugin.utils.messages import short

if TYPE_CHECKING:
    from scripts.audit.explain import AuditFinding
    from scripts.audit.run import Audit

MOST_RANKS, WIDTH = 64, 96  # the largest number of processes on one machine; columns of the output

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


def lines(audit: Audit) -> Iterator[str]:
    """Yield the lines of a text that describes the result of an audit."""
    name = f"{audit.target} ({audit.version})" if audit.version else audit.target
    if audit.not_installed:
        yield f"{name}: {audit.not_installed}"
        return
    steps = f"{len(audit.tried)} steps"
    if audit.right:
        yield f"{name}: right in {steps}; largest relative error {audit.largest_error:.1g}"
    else:
        faults = len(audit.findings)
        yield f"{name}: {faults} fault{'s' * (faults > 1)}, {steps} compared"
    for number, finding in enumerate(audit.findings, 1):
        yield from _of_finding(number, finding)
    if audit.left_out:
        yield from _wrapped("  not tried: ", f"{', '.join(audit.left_out)} (not in `supports`)")


def _of_finding(number: int, finding: AuditFinding) -> Iterator[str]:
    factor = f", {finding.factor} x" if finding.factor else ""
    pattern = "" if finding.pattern == "factor" else f" {finding.pattern}"
    what = f"{', '.join(finding.names)}:{pattern}{factor}".replace(":,", ":")
    only = f", only with {finding.only}" if finding.only else ""
    of = f" of {finding.of}" if finding.of else ""
    yield from _wrapped(f"  {number}. ", f"{what}; in {finding.cases}{of} cases{only}")
    yield from _wrapped("     likely: ", finding.cause)
    yield from _wrapped("     seen: ", finding.example)


def _wrapped(start: str, words: str) -> Iterator[str]:
    yield from textwrap.wrap(words, WIDTH, initial_indent=start, subsequent_indent=" " * 5)
