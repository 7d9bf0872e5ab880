"""Deterministic mode: the same seed, settings and number of ranks give the same bits, also on GPUs
of one model.

What it takes: no layout chosen by a clock (`parallel: auto` is refused) and torch's own strict
mode, in which an operator without a deterministic form is an error. Tiles of Triton kernels follow
a rule, never a clock. Routing, dispatch and our kernels add up
in a fixed order anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


def enable() -> None:
    """Switch on torch's strict deterministic mode for this process, and the cuBLAS workspace that
    it asks for. Before the first product on a GPU.
    """
    # torch and cuBLAS read it; a value that is set stays
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def check(wanted: bool) -> None:
    """`ValueError` if a layer must be deterministic and torch is not."""
    strict = torch.are_deterministic_algorithms_enabled(
    ) and not torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted and not strict:
        raise ValueError(
            "deterministic=True does not fit torch's present mode: must be "
            "torch.use_deterministic_algorithms(True), without warn_only; "
            "call moe_plugin.utils.determinism.enable() before the layer is built")


def seed_of(*numbers: int) -> int:
    """A seed for these numbers, such as step and micro-batch: the same in every process."""
    name = ".".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(name, digest_size=7).digest(), "little")


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers on the CPU and this device by the seed alone; torch's own generators go on
    afterwards as if nothing had been drawn.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
