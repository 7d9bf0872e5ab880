"""What a call of the default layer runs through: calls of Python functions, functions and files.

They are counted forward, after warm-up. A bound is what the code takes; who lowers the one lowers
the other.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin import MoEConfig, MoELayer
from tests.distributed import run_gloo

ROOT = Path(__file__).parents[2]
ROOMS = (str(ROOT / "moe_plugin"), str(ROOT / "kernels"))


def counted(run: Callable[[], Any]) -> tuple[int, int, int]:
    """(calls, functions, files) of this package in a run."""
    calls: Counter[tuple[str, int]] = Counter()

    def on_event(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOMS):
            calls[code.co_filename, code.co_firstlineno] += 1

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls.total(), len(calls), len({file for file, _ in calls})


def _a_call() -> tuple[int, int, int]:
    layer = MoELayer(MoEConfig(model_dim=64, num_experts=8))
    x_TD = torch.randn(32, 64)
    for _ in range(4):  # in calls 2, 4, 8, ... ranks compare samples of their experts
        layer(x_TD).output.sum().backward()
    return counted(lambda: layer(x_TD))


def test_a_call_on_one_rank() -> None:
    calls, functions, files = _a_call()
    assert calls <= 125 and functions <= 100 and files <= 25, (calls, functions, files)


@pytest.mark.distributed
def test_a_call_on_two_ranks() -> None:
    calls, functions, files = map(max, zip(*run_gloo(2, _a_call), strict=True))
    assert calls <= 155 and functions <= 125 and files <= 31, (calls, functions, files)


def test_building_a_layer() -> None:
    MoELayer(MoEConfig(model_dim=64, num_experts=8))
    calls, _, _ = counted(lambda: MoELayer(MoEConfig(model_dim=64, num_experts=8)))
    assert calls <= 675, calls
