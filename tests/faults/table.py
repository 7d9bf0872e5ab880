"""Injects all faults into all hosts and writes the table: `python -m tests.faults.table`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.bench.report import paragraph
from tests.faults.cases import (
    Case,
    Row,
    at_random,
    cases,
    inject,
    reference,
    wrong_products,
)
from tests.faults.damages import damages
from tests.faults.hosts import HOSTS, Host

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "faults.md"
HEAD = """# Injected faults

Small MoE models are trained for 8 steps on two ranks (gloo, CPU) that share the experts. A
checkpoint is written after every third step. Each row is one fault that was injected once. There
are two acceptable outcomes. Either the run ends with an error that names the fault within the
timeout, which is 5 s for an exchange, and a resumed run has the losses of a run without a fault. Or
the run continues with these losses. All ranks must skip a step with a NaN, and the losses after it
must not depend on the rank that had it.

* *Seconds*: the time from the fault to the first error, or the additional time that the run took.
  For files, it is the time to load them.
* *Lost*: the number of steps that were trained again or skipped.

This page is written by `python -m tests.faults.table`. The tests run a part of it (`tests/faults`).
[Faults](../faults.md) explains how to inject a fault yourself.
"""


def of_host(name: str, home: Path, files: int, random: int, only: str,
            done: Sequence[Row]) -> Iterator[Row]:
    """All faults of one host that are not `done`.

    files: damaged ones. random: faults at random times. only: kinds, comma-separated; "": all.
    """
    host: Host = HOSTS[name](home / name)
    checked = name == "checked"
    known = Counter((row.what, row.when) for row in done if row.host == host.name)
    wanted = wrong_products() if checked else [*cases(), *at_random(random)]
    wanted = [case for case in wanted if not only or case.fault.kind in only.split(",")]
    skips = {_moment(case) for case in wanted if not known[case.what, case.when]}
    whole, skipped = reference(host), {}
    for index, case in enumerate(wanted):
        # steps with a NaN are compared: both or none
        if known[case.what, case.when] and (case.wanted != "skips" or _moment(case) not in skips):
            continue
        folder = host.home / "runs" / f"fault-{index}"
        row = inject(host, case, whole, folder, skipped)
        if not known[case.what, case.when]:
            yield row
    have = sum(count for (_, when), count in known.items() if when.startswith("between"))
    if have < files and not checked:
        yield from damages(host, host.home / "runs" / "whole", files - have, have)


def _moment(case: Case) -> tuple[str, int]:
    return case.fault.kind, case.fault.step


def _say(row: Row) -> None:
    print(f"{row.host}: {row.what}, {row.when}: "
          f"{'WRONG: ' + row.wrong if row.wrong else row.outcome} ({row.seconds:.1f} s, "
          f"{row.lost} lost)", flush=True)


def _line(row: Row) -> str:
    return json.dumps(asdict(row)) + "\n"


def pages(rows: Sequence[Row], path: Path) -> dict[Path, str]:
    """The page with counts, and next to it one for each host with every fault."""
    hosts: dict[Path, list[Row]] = {}
    for row in rows:
        name = re.sub(r"\W+", "_", row.host.split(",")[0].lower())
        hosts.setdefault(path.with_name(f"{path.stem}_{name}{path.suffix}"), []).append(row)
    every = [f"[{mine[0].host.split(',')[0]}]({one.name})" for one, mine in hosts.items()]
    return {path: counts(rows, every), **{
        one: every_fault(mine, path.name) for one, mine in hosts.items()}}


def every_fault(rows: Sequence[Row], summary: str) -> str:
    """Every fault of one host. summary: name of the page that says what is injected."""
    return "\n".join([
        f"# Injected faults: {rows[0].host.split(',')[0]}", "",
        f"What is injected, and what the columns mean: [faults]({summary}).", "",
        "| host | fault | when | outcome | seconds | lost |", "|---|---|---|---|---|---|",
        *(f"| {row.host} | {row.what} | {row.when} | {row.wrong or row.outcome} | "
          f"{row.seconds:.1f} | {row.lost} |" for row in rows)]) + "\n"


def counts(rows: Sequence[Row], every: Sequence[str]) -> str:
    """A row for each kind of fault in each host. every: links to every fault."""
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
    return "\n".join([*lines, "", paragraph(f"Every fault: {', '.join(every)}.")]) + "\n"


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
    p.add_argument("--random", type=int, default=24, help="faults at random times in each host")
    p.add_argument("--only", default="", help="kinds of faults, comma-separated (default: all)")
    p.add_argument("--rows", type=Path, default=PAGE.parent / "data" / f"{PAGE.stem}.jsonl",
                   help="JSON lines to which rows are added; what it has with the wanted "
                        "outcome is not injected again (default: %(default)s)")
    p.add_argument("--seconds", type=float, default=math.inf,
                   help="stop after the fault that ends after so long; the next start goes on")
    p.add_argument("--out", type=Path, default=PAGE,
                   help="the page, made of all rows; those with every fault are next to it")
    args = p.parse_args(argv)
    begin, rows = time.monotonic(), []
    if args.rows.exists():
        rows = [Row(**json.loads(line)) for line in args.rows.read_text().splitlines()]
        rows = [row for row in rows if not row.wrong]  # these once more
        args.rows.write_text("".join(map(_line, rows)))
    with tempfile.TemporaryDirectory() as home, contextlib.suppress(TimeoutError):
        for name in args.hosts:
            for row in of_host(name, Path(home), args.files, args.random, args.only, list(rows)):
                _say(row)
                rows.append(row)
                with open(args.rows, "a", encoding="utf-8") as stream:
                    stream.write(_line(row))
                if time.monotonic() - begin > args.seconds:
                    raise TimeoutError
    for path, text in pages(rows, args.out).items():
        path.write_text(text)
    print(f"{len(rows)} faults, the last ones in {time.monotonic() - begin:.0f} s: {args.out}")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
