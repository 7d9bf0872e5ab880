"""Memory that is used again: large CPU tensors without a page fault per page in every step.

glibc maps every large tensor afresh, and the system clears each page when it is first touched:
about 60 us per MiB, more than writing the values takes. A `Workspace` keeps the memory of a
module's large tensors and reuses it as soon as nothing refers to it any more. It needs no release
calls: it reads the storage's count of owners. So a saved activation, a gradient that the user
keeps, or a second use in the same graph stays with its owner, and the next request gets other
memory.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SMALL_BYTES = 1 << 17  # below glibc's mapping threshold memory is reused anyway
SHRINK = 4  # free memory this many times larger than what is asked for is given back
# torch >= 2.1; without it nothing is kept
_use_count = getattr(torch._C, "_storage_Use_Count", None)


class Workspace:
    """What a module keeps between calls: reusable CPU memory by purpose, and state by its type.

    Copies (pickle, deepcopy) start empty. Safe with threads and re-entrant calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, torch.dtype], list[torch.UntypedStorage]] = {}
        self._states: dict[type, Any] = {}

    def state(self, kind: type[T]) -> T:
        """The object of this type that belongs to the module; made without arguments at first."""
        with self._lock:
            if kind not in self._states:
                self._states[kind] = kind()
            return self._states[kind]

    def empty(self, purpose: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Uninitialised tensor of a shape, in `like`'s dtype and device.

        Reuses memory that served `purpose` before, where it is free.
        """
        size = math.prod(shape) * like.element_size()
        reusable = like.device.type == "cpu" and size >= SMALL_BYTES and _use_count is not None
        if not reusable or torch.compiler.is_compiling():
            return like.new_empty(shape)
        with self._lock:
            storage = self._take(purpose, like.dtype, size)
            return torch.empty(0, dtype=like.dtype).set_(storage, 0, shape)  # type: ignore[call-overload]

    def _take(self, purpose: str, dtype: torch.dtype, size: int) -> torch.UntypedStorage:
        kept = self._kept.setdefault((purpose, dtype), [])
        busy, free = [], None
        for index in range(len(kept)):
            if not _idle(kept, index):
                busy.append(kept[index])
            elif free is None and size <= kept[index].nbytes() <= SHRINK * size:
                free = kept[index]
        if free is None:
            # loads change from step to step: leave room
            free = torch.UntypedStorage(size + size // 8)
        self._kept[purpose, dtype] = [*busy, free]
        return free

    def kept_bytes(self) -> int:
        """Bytes of the kept memory, in use or not."""
        return sum(storage.nbytes() for kept in self._kept.values() for storage in kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        return Workspace()

    def __reduce__(self) -> tuple[Any, ...]:
        return Workspace, ()


def _references(kept: list[torch.UntypedStorage], index: int) -> int:
    return sys.getrefcount(kept[index])


def _idle(kept: list[torch.UntypedStorage], index: int) -> bool:
    # only this list owns it, in C++ (tensors, saved activations) and in Python (storage objects)
    return _use_count(kept[index]._cdata) == 1 and _references(kept, index) == _ALONE


_ALONE = _references([torch.UntypedStorage(0)], 0)
