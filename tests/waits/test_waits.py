"""What the host of a GPU waits for, seen without a GPU: every dispatcher, layout, exchange, router
and compute strategy on a device that notes it (`device.py`), and the page that says so.
"""

from __future__ import annotations

import pytest

from tests.combinations import Cell, name_of
from tests.waits import page
from tests.waits.cells import BASE_READS, Seen, matrix, reads
from tests.waits.run import measured

pytest.importorskip("triton", reason="triton is not installed")
CLOSE = 2e-5


def wrong_in(cell: Cell, seen: Seen) -> list[str]:
    """What one rank saw that must not be."""
    if seen.error:
        return [seen.error]
    kinds = [event.kind for event in seen.forward]
    found, wanted = kinds.count("read"), reads(cell) + ("pre_gate" in cell)  # the first block's
    if cell.get("router") == "base":
        return [] if found >= wanted + BASE_READS else [f"{found} reads in router base"]
    started = kinds.index("exchange") if "exchange" in kinds else len(kinds)
    wrong = [f"{found} reads, must be {wanted}"] * (found != wanted)
    wrong += ["a read after rows left"] * ("read" in kinds[started:])
    wrong += [f"{seen.apart:.1g} from the layer on the CPU"] * (not seen.apart <= CLOSE)
    wrong += ["no expert was borrowed"] * ("spill" in cell and not seen.loans)
    wrong += [f"in backward: {e}" for e in seen.backward if e.kind in ("read", "pageable")]
    wrong += [f"{e}" for e in seen.forward if e.kind == "pageable"]
    return wrong + [f"{e}" for e in seen.forward if e.kind == "read" and wrong]


def test_what_the_host_waits_for() -> None:
    seen, wrong = measured(), []
    for cell, ranks in zip(matrix(), seen, strict=True):
        for rank, one in enumerate(ranks):
            name = f"{name_of(cell)}, rank {rank}"
            wrong += [f"{name}: {what}" for what in wrong_in(cell, one)]
    assert not wrong, "\n".join(wrong)


def test_the_page_says_so() -> None:
    assert page.text() == page.PAGE.read_text(encoding="utf-8"), (
        f"{page.PAGE.name} is out of date; run: python -m tests.waits")
