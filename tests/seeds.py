"""The one random generator of torch, where several threads play ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is drawn inside is the same on each simulated rank: one rank draws at a time.

    No collective may run inside: the other ranks would wait for the generator.
    """
    with _LOCK:
        torch.manual_seed(seed)
        yield
