"""The fuzz tests with many more inputs: `python -m tests.fuzz.run --times 40`.

Every test of this folder that draws inputs runs for as many times more of them; a failing input is
printed and the other tests go on. Counts are added to docs/benchmarks/data/fuzz.jsonl, of which
docs/benchmarks/fuzz.md is made.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hypothesis import is_hypothesis_test, settings

import tests.fuzz
from tests.fuzz.hostile import DEFAULT_EXAMPLES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "fuzz.md"
HANGS_S = 120  # an input that takes longer hangs
HEAD = """# Inputs of the fuzzer

Settings, files and checkpoints with unusual values are given to the code that reads them. The
outcome must be a result, or an error that names the invalid value, within {hangs} s. hypothesis
generates the inputs, and each run has different inputs. Failures are those of the last run of a
test. Each input that failed earlier was fixed and has a test of its own.

This page is written by `python -m tests.fuzz.run`. The tests run a part of it (`tests/fuzz`).

| test | inputs | seconds | failures |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """One run of a test: inputs that it was given, and its failure or ""."""

    test: str
    inputs: int
    seconds: float
    failure: str


def drawing(only: str) -> Iterator[tuple[str, Callable[..., None]]]:
    """The tests that draw inputs."""
    for module in pkgutil.iter_modules(tests.fuzz.__path__):
        if module.name.startswith("test_"):
            content = vars(importlib.import_module(f"tests.fuzz.{module.name}"))
            for name, test in content.items():
                if name.startswith("test_") and is_hypothesis_test(test) and only in name:
                    yield f"{module.name[5:]}: {name[5:].replace('_', ' ')}", test


def _hangs(*_: Any) -> None:
    raise TimeoutError(f"an input takes more than {HANGS_S} s")


def run(test: Callable[..., None]) -> tuple[int, str]:
    """Inputs that this test was given, and its failure or ""."""
    inner, count = test.hypothesis.inner_test, 0

    def counted(*args: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        signal.alarm(HANGS_S)
        try:
            inner(*args, **options)
        finally:
            signal.alarm(0)

    test.hypothesis.inner_test = counted
    with tempfile.TemporaryDirectory() as folder:
        fixtures = {"tmp_path": Path(folder)}
        wanted = {name: fixtures[name] for name in inspect.signature(test).parameters}
        try:
            test(**wanted)
        except Exception:
            return count, traceback.format_exc()
        finally:
            test.hypothesis.inner_test = inner
    return count, ""


def page(rows: Iterable[Row]) -> str:
    """The page: runs of a test added up."""
    tests: dict[str, list[Row]] = {}
    for row in rows:
        tests.setdefault(row.test, []).append(row)
    lines = [f"| {name} | {sum(row.inputs for row in runs):,} | "
             f"{sum(row.seconds for row in runs):.0f} | {int(bool(runs[-1].failure))} |"
             for name, runs in sorted(tests.items())]
    lines.append(f"| all | {sum(row.inputs for runs in tests.values() for row in runs):,} | | "
                 f"{sum(bool(runs[-1].failure) for runs in tests.values())} |")
    return HEAD.format(hangs=HANGS_S) + "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if any input made a test fail."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--times", type=int, default=40, help="inputs, as a multiple of the tests'")
    p.add_argument("--only", default="", help="part of the name of the tests to run")
    p.add_argument("--seconds", type=float, default=math.inf,
                   help="begin no test after so long; the next start goes on with those that have "
                        "had the fewest runs")
    p.add_argument("--rows", type=Path, default=PAGE.parent / "data" / f"{PAGE.stem}.jsonl",
                   help="JSON lines to which the runs are added (default: %(default)s)")
    p.add_argument("--out", type=Path, default=PAGE)
    args = p.parse_args(argv)
    settings.register_profile("long", max_examples=args.times * DEFAULT_EXAMPLES)
    settings.load_profile("long")
    signal.signal(signal.SIGALRM, _hangs)
    lines = args.rows.read_text().splitlines() if args.rows.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    begun = len(rows)
    waiting = sorted(drawing(args.only), key=lambda pair: sum(row.test == pair[0] for row in rows))
    first = time.monotonic()
    for name, test in waiting:
        if (begin := time.monotonic()) - first > args.seconds:
            break
        count, failure = run(test)
        rows.append(Row(name, count, round(time.monotonic() - begin, 1), failure[-2000:]))
        with open(args.rows, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(rows[-1])) + "\n")
        print(f"{name}: {count} inputs, {rows[-1].seconds} s" + (f"\n{failure}" if failure else ""),
              flush=True)
    args.out.write_text(page(rows))
    return int(any(row.failure for row in rows[begun:]))


if __name__ == "__main__":
    sys.exit(main())
