"""Imported once by the server that forks processes with a fake GPU (tests/preloaded.py)."""

import contextlib
import importlib

import torch._dynamo  # noqa: F401 - 900 modules, which the first optimizer imports

with contextlib.suppress(ImportError):
    for name in ("triton", "tests.fake_gpu.later_ranks", "tests.fake_gpu.race_cells",
                 "tests.fake_gpu.together", "tests.fake_gpu.captured",
                 "tests.fake_gpu.second_device"):
        importlib.import_module(name)
