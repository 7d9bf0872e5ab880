"""Ways to multiply rows on a CPU that processors choose for 16 bits, here for every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_plugin.kernels.cpu import expert_ffn as fused
from moe_plugin.kernels.cpu.products import BEGIN, RowRule


class Rounding(RowRule):
    """Also computes a few of the rows that follow."""

    def fast(self, rows: int) -> int:
        return -(-rows // 5) * 5


RULES = {
    "own": RowRule(),
    "together": RowRule(narrow=True, work=1, least=1),
    "some together": Rounding(narrow=True, work=BEGIN // 3, least=1),
    "rounded": Rounding(),
}


@contextmanager
def rows_computed(how: str) -> Iterator[None]:
    """Strategy `fused` multiplies rows by this rule of `RULES`."""
    before = fused.row_rule
    fused.row_rule = lambda like, width, inner: RULES[how]
    try:
        yield
    finally:
        fused.row_rule = before
