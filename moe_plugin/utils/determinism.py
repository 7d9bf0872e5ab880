"""Deterministic mode: runs with the same seed, settings and ranks have bitwise identical results.

On GPUs, results are bitwise identical only for GPUs of the same model. In this mode, the layout
must not be chosen by
measured times, so `parallel: auto` is not allowed. The mode also requires torch's strict mode, in
which operators without a deterministic implementation raise an error. The tile sizes of Triton
kernels are chosen by a fixed rule instead of by measurements. Routing, dispatch and the kernels of
this package always sum values in a fixed order.

This module also contains functions that seed random generators, and `RecordedChoice`, which repeats
the random draws of an earlier choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor


def enable() -> None:
    """Enable torch's strict deterministic mode, and set the cuBLAS workspace that this mode
    requires.

    Call this function before the first matmul on a GPU.
    """
    # read by torch and cuBLAS; a value set by the user is kept
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def check(wanted: bool) -> None:
    """Raise a `ValueError` if deterministic results are required (`wanted`) but torch's strict
    deterministic mode is not enabled.
    """
    strict = torch.are_deterministic_algorithms_enabled(
    ) and not torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted and not strict:
        raise ValueError(
            "deterministic=True requires torch.use_deterministic_algorithms(True) without "
            "warn_only. Call moe_plugin.utils.determinism.enable() before building the layer")


def seed_of(*numbers: int) -> int:
    """Compute a seed, which is the same in every process, from numbers such as the step and the
    micro-batch.
    """
    name = ".".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(name, digest_size=7).digest(), "little")


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside the block, seed the random generators of the CPU and of `device` with `seed`.

    After the block, the previous states of the generators are restored.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class RecordedChoice:
    """The result of a choice, and the states of the random generators before and after the choice
    was made.
    """

    value: Any
    moves: tuple[tuple[torch.Generator, Tensor, Tensor], ...] = ()

    @classmethod
    def of(cls, choose: Callable[[], Any]) -> RecordedChoice:
        before = [(g, g.get_state()) for g in _generators()]
        value = choose()
        moves = ((g, state, g.get_state()) for g, state in before)
        return cls(value, tuple(move for move in moves if not _equal(move[1], move[2])))

    def move_generators(self) -> None:
        """If a random generator is in its state before the choice, for example after loading a
        checkpoint, set it to its state after the choice.
        """
        for generator, before, after in self.moves:
            if _equal(generator.get_state(), before):
                generator.set_state(after)


def _generators() -> list[torch.Generator]:
    """Return all default random generators whose states can currently be read."""
    generators = [torch.default_generator]
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized() and not (
                device is torch.cuda and torch.cuda.is_current_stream_capturing()):
            generators += getattr(device, "default_generators", ())
    return generators


def _equal(a: Tensor, b: Tensor) -> bool:
    # numpy, because a dispatch mode that counts operations would also count a torch comparison
    return bool((a.numpy() == b.numpy()).all())
