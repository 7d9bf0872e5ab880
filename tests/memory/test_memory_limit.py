"""A model whose experts are ten times a process's memory limit computes."""

from __future__ import annotations

import os
import re
import resource
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer

LIMIT, WIDTH, INNER, EXPERTS, LAYERS = 64 << 20, 256, 1024, 40, 8
EXPERT = 8 * WIDTH * INNER


def in_a_child(function: Callable[[], None]) -> None:
    """Run it in a fork that may take `LIMIT` bytes of memory more than it has."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status_file = Path("/proc/self/status").read_text()
            data = int(re.search(r"VmData:\s+(\d+) kB", status_file)[1]) << 10
            resource.setrlimit(resource.RLIMIT_DATA, (data + LIMIT, -1))
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def model(store: str, folder: Path) -> list[MoELayer]:
    config = from_dict({
        "model_dim": WIDTH, "num_experts": EXPERTS, "router": {"top_k": 2}, "experts": {
            "hidden_dim": INNER, "bias": False, "compute": "loop", "store": store,
            "store_path": str(folder) if store == "disk" else None}})
    return [MoELayer(config).eval() for _ in range(LAYERS)]


def test_experts_of_ten_times_the_limit(tmp_path):
    assert LAYERS * EXPERTS * EXPERT >= 10 * LIMIT

    def on_disk() -> None:
        x, layers = torch.randn(2, WIDTH), model("disk", tmp_path)
        with torch.no_grad():
            for _ in range(2):
                for layer in layers:
                    x = x + layer(x).output
        assert bool(x.isfinite().all())
        assert layers[0].experts.store.cache.nbytes <= 2 * 4 * EXPERT

    def resident() -> None:
        with pytest.raises((RuntimeError, MemoryError), match="allocate|memory|^$"):
            model("device", tmp_path)

    in_a_child(on_disk)
    in_a_child(resident)
