"""All of `tests.faults.disks`, with long runs of `MOE_SOAK_MINUTES` (20) minutes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.disks import cases, page
from tests.faults.seen import NAMES, Seen, last_line

MINUTES = float(os.environ.get("MOE_SOAK_MINUTES", "20"))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts disks: only root may")


@needs_root
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", cases(Path(), MINUTES))
def test_all(name: str, tmp_path: Path) -> None:
    for module in ("fairseq", "megatron.core"):
        pytest.importorskip(module)
    rows = list(cases(tmp_path, MINUTES)[name]())
    assert rows and not [row for row in rows if row.wrong], rows


def test_the_page_shows_what_is_wrong() -> None:
    good = Seen("disk full", NAMES["plain"], "error: full", "all")
    bad = Seen("disk slow", NAMES["fairseq"], "nothing", "all", "it hangs")
    assert "2 cases were tried. 1 of them ended in another way than it should." in page([good, bad])
    assert "| disk slow | fairseq | nothing | it hangs |" in page([good, bad])


def test_the_last_error_of_a_log(tmp_path: Path) -> None:
    log = f"ERROR:megatron: inner error: x\nprog: error: {tmp_path}/run is  full\nmore lines"
    assert last_line(log, tmp_path) == "prog: error: DISK/run is full"
