"""Deterministic mode, in which runs with the same seed, settings and ranks give identical results.

Results are bitwise identical, including on GPUs of the same model. This mode requires a layout that
is not chosen by measured times, so `parallel: auto` is refused. The mode also requires torch's
strict mode, in which an operator without a deterministic implementation raises an error. Tile sizes
of Triton kernels follow a fixed rule instead of measurements. Routing, dispatch and the kernels of
this package always sum in a fixed order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


def enable() -> None:
    """Enable torch's strict deterministic mode and the cuBLAS workspace that this mode requires.

    Call this function before the first matmul on a GPU.
    """
    # read by torch and cuBLAS; a value set by the user is kept
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def check(wanted: bool) -> None:
    """Raise a `ValueError` if a layer must be deterministic (`wanted`) and torch's strict mode is
    off.
    """
    strict = torch.are_deterministic_algorithms_enabled(
    ) and not torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted and not strict:
        raise ValueError(
            "deterministic=True requires torch.use_deterministic_algorithms(True) without "
            "warn_only. Call moe_plugin.utils.determinism.enable() before building the layer")


def seed_of(*numbers: int) -> int:
    """Return a seed that is derived from the given numbers, such as step and micro-batch. The seed
    is the same in every process.
    """
    name = ".".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(name, digest_size=7).digest(), "little")


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's random generators of the CPU and of `device` with `seed` inside the block.

    Afterwards, the generators have the same state as before the block.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
