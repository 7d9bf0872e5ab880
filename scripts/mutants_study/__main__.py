"""Measure which faults the tests find: a mutation study of the package's core.

    pip install cosmic-ray
    python -m scripts.mutants_study generate --number 300 --seed 1
    python -m scripts.mutants_study cover      # the tests of the five-minute set by default
    python -m scripts.mutants_study run
    python -m scripts.mutants_study collect COMMIT
    python -m scripts.mutants_study page DATE

Each mutant is one small fault in one line, such as a dropped call, a missing scale, another axis or
a negated condition. A mutant is killed if a test fails. `cover` runs the tests once and records for
each test the lines that it executes, also in other processes. `run` then runs for each mutant only
the tests that execute its line, the quickest tests first, and stops at the first failure. A mutant
that no test executes survives. The results are stored in `runs/mutants`, and an interrupted
command continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from scripts.mutants_study.faults import ROOT, Mutant, generate
from scripts.mutants_study.runs import KILLED, RUNS, TIMED_OUT, cover, run

BENCHMARKS = ROOT / "docs" / "benchmarks"
PAGE, DATA = BENCHMARKS / "mutants.md", BENCHMARKS / "data" / "mutants.json"
TEXT = """# Faults that the tests find

This page shows how many small faults the tests find. Each *mutant* is a copy of the package with
one fault in one line of its core: routing, dispatch, experts, collectives, tuning, gradients, the
hosts' losses and gradients, and checkpoints. The {number} mutants were chosen at random, with about
the same number of each kind of fault. Kinds in lower case are faults that are typical of
distributed training. The other kinds are operators of cosmic-ray.

This page is written by `python -m scripts.mutants_study page DATE`, after the commands `generate`,
`cover`, `run` and `collect`. It was written on {date}. Each sample of mutants belongs to one
commit, whose line numbers the last table uses. For each mutant, the study runs only the tests that
execute the changed line, because no other test can find the fault. Not all chosen mutants were run:
133 of 320 in the first sample, and 150 of 187 in the second sample. In the second sample, most of
the mutants that were not run are in lines that many tests execute, so its share is too low.

* *Found at first*: a test of `bash scripts/test.sh`, as it was at the commit of the sample, fails.
  This column measures the tests.
* *Found now*: a test that exists now fails. These include tests that were written because a mutant
  survived, so this column shows only which known gaps are left. A new random sample would again
  contain mutants that no test finds.
* *Equivalent*: the mutant computes the same results as the original code, so no test can find it.
  The last table states the reason. Equivalent mutants are excluded from the shares.

{samples}

## By part of the package

{shares}

## By kind of fault

{kinds}

## Mutants that were not found at first

{survivors}
"""


def stored() -> list[Mutant]:
    """Return the chosen mutants."""
    return [Mutant(**entry) for entry in json.loads((RUNS / "mutants.json").read_text())]


def collect(commit: str) -> None:
    """Store the results of `run` in the file that contains the judgements.

    commit: commit that contains the measured code.
    """
    known = {entry["key"]: entry for entry in json.loads(DATA.read_text())} if DATA.exists() else {}
    for path in sorted(RUNS.glob("results*.jsonl")):
        for line in path.read_text().splitlines():
            entry = {"commit": commit, **json.loads(line)}
            entry["key"] = f"{commit} {entry['key']}"
            known[entry["key"]] = {"judgement": "", "all": "", **known.get(entry["key"], {}),
                                   **{name: entry[name] for name in (
                                       "key", "commit", "path", "first", "kind", "before", "after",
                                       "result", "test")}}
    DATA.write_text(json.dumps(sorted(known.values(), key=lambda entry: entry["key"]), indent=1)
                    + "\n", encoding="utf-8")


def write_page(date: str) -> None:
    """Write the page from the stored results and judgements.

    The field `all` of a survivor names the test outside of the five-minute set that finds the
    fault. The field `judgement` states why a mutant is equivalent, or why no test finds it.
    """
    entries = json.loads(DATA.read_text())
    fast = {entry["key"] for entry in entries if entry["result"] in (KILLED, TIMED_OUT)}
    found = fast | {entry["key"] for entry in entries if entry["all"]}
    equal = {entry["key"] for entry in entries
             if entry["judgement"].startswith("equivalent") and entry["key"] not in found}

    def row(name: str, some: list[dict[str, str]]) -> str:
        keys = {entry["key"] for entry in some}
        judged = len(keys - equal)
        shares = [f"{len(keys & which)} ({100 * len(keys & which) / max(1, judged):.0f} %)"
                  for which in (fast, found)]
        return f"| {name} | {len(keys)} | {len(keys & equal)} | {shares[0]} | {shares[1]} |"

    header = ("| | mutants | equivalent | found at first | found now |\n"
              "|---|---|---|---|---|\n")
    by_kind, by_part, by_commit = defaultdict(list), defaultdict(list), defaultdict(list)
    for entry in entries:
        by_kind[entry["kind"]].append(entry)
        by_commit[entry["commit"]].append(entry)
        by_part[entry["path"].split("/")[1].removesuffix(".py")].append(entry)
    survivors = [entry for entry in entries if entry["key"] not in fast]
    PAGE.write_text(TEXT.format(
        number=len(entries), date=date,
        samples=header + "\n".join(row(f"commit {name}", some)
                                   for name, some in sorted(by_commit.items())),
        shares=header + "\n".join([*(row(name, some) for name, some in sorted(by_part.items())),
                                   row("all", entries)]),
        kinds=header + "\n".join(row(f"`{name}`", some) for name, some in sorted(by_kind.items())),
        survivors="| commit | line | original | mutant | result |\n|---|---|---|---|---|\n"
        + "\n".join(
            f"| {entry['commit']} | `{entry['path'].removeprefix('moe_plugin/')}:{entry['first']}` "
            f"| {code(entry['before'])} | {code(entry['after'])} "
            f"| {'found by `' + entry['all'] + '`' if entry['all'] else entry['judgement']} |"
            for entry in survivors)), encoding="utf-8")


def code(text: str) -> str:
    """Return a piece of code as text of a table's cell."""
    return "`" + " ".join(text.split()).replace("|", "\\|") + "`"


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("generate", help="choose mutants at random")
    command.add_argument("--number", type=int, default=300)
    command.add_argument("--seed", type=int, default=1)
    command = commands.add_parser("cover", help="record which tests execute which lines")
    command.add_argument("--workers", type=int, default=2)
    command.add_argument("tests", nargs="*", help="arguments of pytest (default: --fast)")
    command = commands.add_parser("run", help="run the tests for each mutant")
    command.add_argument("--part", type=int, default=0, help="number of this process")
    command.add_argument("--parts", type=int, default=1, help="number of processes")
    command.add_argument("--tree", type=Path, default=ROOT,
                         help="copy of the checkout in which this process plants the faults")
    command.add_argument("--limit", type=float, default=240.0, help="seconds per mutant")
    command = commands.add_parser("collect", help="store the results next to the page")
    command.add_argument("commit", help="commit that contains the measured code")
    command = commands.add_parser("page", help="write the page from the stored results")
    command.add_argument("date", help="date of the measurement")
    given, rest = parser.parse_known_args(None if arguments is None else list(arguments))
    RUNS.mkdir(parents=True, exist_ok=True)
    if given.command == "generate":
        mutants = generate(given.number, given.seed)
        (RUNS / "mutants.json").write_text(json.dumps([asdict(each) for each in mutants], indent=1))
        for kind, number in Counter(each.kind for each in mutants).most_common():
            print(f"{number:5} {kind}")
    elif given.command == "cover":
        cover([*given.tests, *rest] or ["--fast"], given.workers)
    elif given.command == "collect":
        collect(given.commit)
    elif given.command == "page":
        write_page(given.date)
    else:
        run(stored(), given.part, given.parts, given.tree.resolve(), given.limit)


if __name__ == "__main__":
    main()
