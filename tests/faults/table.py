"""Injects all faults into all hosts and writes the table: `python -m tests.faults.table`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.faults.cases import Case, Row, cases, inject, reference
from tests.faults.damages import damages
from tests.faults.hosts import HOSTS, Host

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "faults.md"
HEAD = """# Injected faults

Small MoE models on two ranks (gloo, CPU) that share the experts, trained for 8 steps with a
checkpoint after every third one. Each row is one fault, injected once; the run then must end by a
named error within the timeout (5 s for an exchange) and resume to the losses of a run in which
nothing happened, or go on to the same losses. A step with a NaN must be skipped on all ranks, and
the losses after it must not depend on the rank that had it. *Seconds*: from the fault to the first
error, or by which the run took longer; for files, of the load. *Lost*: steps that were trained
again or skipped. Written by `python -m tests.faults.table`; a part of it runs with the tests
(`tests/faults`). How to inject one yourself: [faults](../faults.md).
"""


def of_host(name: str, home: Path, files: int, wanted: Sequence[Case],
            done: Sequence[Row]) -> Iterator[Row]:
    """All faults of one host that are not `done`."""
    host: Host = HOSTS[name](home / name)
    known = Counter((row.what, row.when) for row in done if row.host == host.name)
    whole, skipped = reference(host), {}
    for index, case in enumerate(wanted):
        if known[case.what, case.when] and case.wanted != "skips":  # these are compared
            continue
        folder = host.home / "runs" / f"fault-{index}"
        row = inject(host, case, whole, folder, skipped)
        if not known[case.what, case.when]:
            yield row
    have = sum(count for (_, when), count in known.items() if when.startswith("between"))
    if have < files:
        yield from damages(host, host.home / "runs" / "whole", files - have, have)


def _say(row: Row) -> None:
    print(f"{row.host}: {row.what}, {row.when}: "
          f"{'WRONG: ' + row.wrong if row.wrong else row.outcome} ({row.seconds:.1f} s, "
          f"{row.lost} lost)", flush=True)


def page(rows: Iterable[Row]) -> str:
    """The page: counts, then every fault."""
    rows = list(rows)
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.host, _kind(row)), []).append(row)
    lines = [HEAD, f"{len(rows)} faults, {sum(bool(row.wrong) for row in rows)} with another "
             "outcome than asked for.", "", "| host | fault | times | outcomes | seconds, median "
             "and most | lost steps, at most |", "|---|---|---|---|---|---|"]
    for (host, kind), found in kinds.items():
        outcomes = "; ".join(f"{sum(r.outcome == o for r in found)} {o}"
                             for o in dict.fromkeys(row.outcome for row in found))
        took = sorted(row.seconds for row in found)
        lines.append(f"| {host} | {kind} | {len(found)} | {outcomes} | {took[len(took) // 2]:.1f}, "
                     f"{took[-1]:.1f} | {max(row.lost for row in found)} |")
    lines += ["", "Every fault:", "", "| host | fault | when | outcome | seconds | lost |",
              "|---|---|---|---|---|---|"]
    lines += [f"| {row.host} | {row.what} | {row.when} | {row.wrong or row.outcome} | "
              f"{row.seconds:.1f} | {row.lost} |" for row in rows]
    return "\n".join(lines) + "\n"


def _kind(row: Row) -> str:
    if row.when.startswith("between"):
        return f"file damaged: {row.what.split(':')[0]}"
    kind, who = row.what.rsplit(", ", 1)
    return f"{kind.split()[0]}, {'node' if who == 'all ranks' else 'rank'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if any outcome is wrong."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--hosts", type=lambda text: text.split(","), default=list(HOSTS))
    p.add_argument("--files", type=int, default=48, help="damaged files of each host")
    p.add_argument("--only", default="", help="kinds of faults, comma-separated (default: all)")
    p.add_argument("--rows", type=Path,
                   help="JSON lines to which rows are added; what it has is not injected again")
    p.add_argument("--out", type=Path, default=PAGE, help="the page, made of all rows")
    args = p.parse_args(argv)
    wanted = [case for case in cases() if not args.only or case.fault.kind in args.only.split(",")]
    begin, rows = time.monotonic(), []
    if args.rows and args.rows.exists():
        rows = [Row(**json.loads(line)) for line in args.rows.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as home:
        for name in args.hosts:
            for row in of_host(name, Path(home), args.files, wanted, list(rows)):
                _say(row)
                rows.append(row)
                if args.rows:
                    with open(args.rows, "a", encoding="utf-8") as stream:
                        stream.write(json.dumps(asdict(row)) + "\n")
    args.out.write_text(page(rows))
    print(f"{len(rows)} faults in {time.monotonic() - begin:.0f} s: {args.out}")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
