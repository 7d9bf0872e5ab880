"""What a layer does on a GPU's streams: what a CUDA graph can hold, on which device it launches,
and what a thread does that drops rows in pages.
"""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_plugin.dispatch.row_pages import PAGE, Kept, Pages
from tests.fake_gpu import stand_ins
from tests.fake_gpu.captured import ALONE, TOGETHER, captured, statements
from tests.fake_gpu.device import CountingDevice
from tests.fake_gpu.fake import install
from tests.fake_gpu.gpu import CUDA
from tests.fake_gpu.harness import on_ranks
from tests.fake_gpu.second_device import FAULTS, OF_RANKS, PROGRAMS, run
from tests.fake_gpu.seen import Launch, Observer

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("cells", [ALONE, TOGETHER], ids=["alone", "together"])
def test_layers_do_what_they_promise(cells: list[Any], tmp_path: Any) -> None:
    """Those that promise nothing are found out: the lint sees what it is for."""
    world = 1 if cells is ALONE else 2
    for found in on_ranks(world, captured, world, str(tmp_path)):
        for (*cell, promised), (launches, wrong) in zip(cells, found, strict=True):
            assert promised == (not wrong), f"{cell}: {wrong}"
            assert launches > 20 or wrong


def test_what_no_capture_may_hold_is_found() -> None:
    [found] = on_ranks(1, statements)
    assert {name for name, wrong in found.items() if not wrong} == {
        name for name in found if name.startswith("(")}, found


@pytest.mark.parametrize("world", [1, 2])
def test_all_is_on_the_device_of_its_tensors(world: int, tmp_path: Any) -> None:
    for found in on_ranks(world, run, world, str(tmp_path)):
        wrong = {name: what for name, (what, _) in found.items() if name in PROGRAMS and what}
        assert not wrong
        seen = {kind for name, (_, counts) in found.items() if name in PROGRAMS for kind in counts}
        assert seen == {"launch", "kernel", "event", "wait"}
        missed = [fault for fault in (FAULTS if world == 1 else OF_RANKS) if not found[fault][0]]
        assert not missed


class Elsewhere(Observer):
    """Launches of other threads than the program's."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def launched(self, launch: Launch) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.found.append(launch.name)


def _keep(pages: Pages) -> Kept:
    return Kept(pages, torch.ones(2, PAGE, device=CUDA), torch.tensor([1, 1]).to(CUDA))


def dropped(careless: bool) -> tuple[list[str], list[int]]:
    """What another thread launches that drops rows in pages, and how many pages are in use before,
    after that and after the next rows. careless: pages are freed where rows are dropped.
    """
    looks = Elsewhere()
    install(None, looks)
    stand_ins.install()
    with CountingDevice():
        pages = Pages(4, 0, torch.empty(0, device=CUDA))
        kept, in_use = [_keep(pages)], [int(pages.in_use)]

        def drop() -> None:
            with CountingDevice():
                kept.clear()

        thread = threading.Thread(target=drop)
        with patch.object(Pages, "drop", Pages.free if careless else Pages.drop):
            thread.start()
            thread.join()
        in_use.append(int(pages.in_use))
        next_rows = _keep(pages)
        in_use.append(int(pages.in_use))
        del next_rows
    return looks.found, in_use


@pytest.mark.parametrize("careless", [False, True])
def test_rows_are_dropped_in_another_thread(careless: bool) -> None:
    [(found, in_use)] = on_ranks(1, dropped, careless)
    assert bool(found) == careless, "who frees at once launches in that thread"
    assert in_use == [2, 0 if careless else 2, 2]
