"""A module on a fake GPU: `python -m tests.scripts.bench.counting_gpu FAILS -m MODULE ARGUMENT..`.

Where FAILS is among the arguments, the first kernel fails as on a GPU: with an error of the driver.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from typing import Any

import torch
import triton  # noqa: F401  (stand-ins are for its kernels)

from tests.fake_gpu import stand_ins
from tests.fake_gpu.device import CountingDevice
from tests.fake_gpu.fake import install
from tests.fake_gpu.seen import Observer

ERROR = "CUDA error: an illegal memory access was encountered"


class Fails(Observer):
    """A GPU whose kernels do not run."""

    def kernel(self, name: str, args: Sequence[Any], current: int) -> None:
        raise RuntimeError(f"{ERROR} in {name}")


class OfHost(torch.Generator):
    """A generator for any device."""

    def __new__(cls, device: object = None) -> OfHost:
        return super().__new__(cls)


def main(fails: str, _: str, module: str, *arguments: str) -> None:
    """Run it."""
    install(None, *([Fails()] if fails in arguments else []))
    stand_ins.install()
    for name, value in {"is_available": lambda: True, "_sleep": lambda cycles: None,
                        "reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: 0,
                        "max_memory_allocated": lambda: 0}.items():
        setattr(torch.cuda, name, value)
    torch.Generator = OfHost
    sys.argv = [module, *arguments]
    with CountingDevice():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
