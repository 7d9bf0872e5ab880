"""Format the result of an audit as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from scripts.audit.explain import AuditFinding
from scripts.audit.run import Audit

WIDTH = 96


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
