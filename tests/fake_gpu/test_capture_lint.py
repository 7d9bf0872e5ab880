"""Layers that promise to fit in a CUDA graph do nothing that a capture forbids."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_gpu.captured import ALONE, TOGETHER, captured, statements
from tests.preloaded import Server

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("cells", [ALONE, TOGETHER], ids=["alone", "together"])
def test_layers_do_what_they_promise(cells: list[Any], tmp_path: Any) -> None:
    """Those that promise nothing are found out: the lint sees what it is for."""
    world = 1 if cells is ALONE else 2
    done = Server("tests.fake_gpu.captured").run(world, captured, world, str(tmp_path))
    assert done.code == 0, done.log
    for found in done.results:
        for (*cell, promised), (launches, wrong) in zip(cells, found, strict=True):
            assert promised == (not wrong), f"{cell}: {wrong}"
            assert launches > 20 or wrong


def test_what_no_capture_may_hold_is_found() -> None:
    done = Server("tests.fake_gpu.captured").run(1, statements)
    assert done.code == 0, done.log
    (found,) = done.results
    assert {name for name, wrong in found.items() if not wrong} == {
        name for name in found if name.startswith("(")}, found
