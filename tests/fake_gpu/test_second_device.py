"""What a layer and its surroundings launch is on the device of its tensors, not the current one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_gpu.second_device import FAULTS, OF_RANKS, PROGRAMS, run
from tests.preloaded import Server

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("world", [1, 2])
def test_all_is_on_the_device_of_its_tensors(world: int, tmp_path: Any) -> None:
    done = Server("tests.fake_gpu.second_device").run(world, run, world, str(tmp_path))
    assert done.code == 0, done.log
    for found in done.results:
        wrong = {name: what for name, (what, _) in found.items() if name in PROGRAMS and what}
        assert not wrong
        seen = {kind for name, (_, counts) in found.items() if name in PROGRAMS for kind in counts}
        assert seen == {"launch", "kernel", "event", "wait"}
        missed = [fault for fault in (FAULTS if world == 1 else OF_RANKS) if not found[fault][0]]
        assert not missed
