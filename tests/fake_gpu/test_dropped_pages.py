"""Rows in pages may be dropped in any thread, as garbage is: nothing is launched there."""

from __future__ import annotations

import threading
from unittest.mock import patch

import pytest
import torch

from moe_plugin.dispatch.row_pages import PAGE, Kept, Pages
from tests.fake_gpu import stand_ins
from tests.fake_gpu.device import CountingDevice
from tests.fake_gpu.fake import install
from tests.fake_gpu.gpu import CUDA
from tests.fake_gpu.seen import Launch, Observer
from tests.preloaded import Server

pytest.importorskip("triton", reason="triton is not installed")


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
    done = Server("tests.fake_gpu.test_dropped_pages").run(1, dropped, careless)
    assert done.code == 0, done.log
    [(found, in_use)] = done.results
    assert bool(found) == careless, "who frees at once launches in that thread"
    assert in_use == [2, 0 if careless else 2, 2]
