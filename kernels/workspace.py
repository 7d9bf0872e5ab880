"""Memory that is used again: large CPU tensors without a page fault per page in every step.

glibc maps every large tensor afresh, and the system clears each page when it is first touched:
about 60 us per MiB, more than writing the values takes. A `Workspace` keeps the memory of large
tensors and reuses it as soon as nothing refers to it any more. It needs no release calls: it reads
the storage's count of owners. So a saved activation, a gradient that the user keeps, or a second
use in the same graph stays with its owner, and the next request gets other memory.

All modules of a process share one `MemoryPool`: what a layer does not need any more serves the next
one, so that the layers of a model together keep what is in use at the same time, and not the most
that each of them ever needed.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SMALL_BYTES = 1 << 17  # below glibc's mapping threshold memory is reused anyway
SHRINK = 4  # what asks for less than one part in so many of free memory does not get it
SWEEP = 4096  # requests between two looks for purposes that nothing asks for any more
PATIENCE = 64  # requests, at least, without which free memory is given back; see `_Kept`
# torch >= 2.1; without it nothing is kept
_use_count = getattr(torch._C, "_storage_Use_Count", None)


@dataclass
class _Kept:
    """Memory of one purpose and data type.

    Attributes:
        storages: in use or free.
        seen: the last request at which each was in use.
        requests: so far.
        swept: requests at the last sweep.
    """

    storages: list[torch.UntypedStorage] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    requests: int = 0
    swept: int = 0

    def take(self, size: int) -> torch.UntypedStorage:
        """At least `size` bytes that nothing else uses: the smallest that fits, or new ones.

        Free memory that is a little too small for new ones goes in exchange for them. So there are
        never more of a size than were in use at once; what for a long time was not needed, longer
        than a step in which each of them serves once, is given back.
        """
        self.requests += 1
        free = self._free()
        fitting = [i for i in free if size <= self.storages[i].nbytes() <= SHRINK * size]
        if fitting:
            chosen = min(fitting, key=lambda i: self.storages[i].nbytes())
            self.seen[chosen] = self.requests
            return self.storages[chosen]
        small = [i for i in free if self.storages[i].nbytes() < size <= SHRINK
                 * self.storages[i].nbytes()]
        if small:
            self._drop({small[-1]})
        # loads change from step to step: leave room
        self.storages.append(torch.UntypedStorage(size + size // 8))
        self.seen.append(self.requests)
        return self.storages[-1]

    def _free(self) -> list[int]:
        """Where free memory is; what was free for too long, or others read, leaves."""
        free, old = [], set()
        patience = max(PATIENCE, 2 * len(self.storages))
        for index, seen in enumerate(self.seen):
            if self.storages[index].is_shared():
                old.add(index)
            elif not _idle(self.storages, index):
                self.seen[index] = self.requests
            elif self.requests - seen > patience:
                old.add(index)
            else:
                free.append(index)
        if old:
            self._drop(old)
            return self._free()
        return free

    def sweep(self) -> bool:
        """Give back what has been free since the last sweep; whether anything is left."""
        unused = self.requests == self.swept
        self.swept = self.requests
        if unused:
            self._drop({i for i in range(len(self.storages)) if _idle(self.storages, i)})
        return bool(self.storages)

    def _drop(self, gone: set[int]) -> None:
        left = [i for i in range(len(self.storages)) if i not in gone]
        self.storages, self.seen = ([self.storages[i] for i in left], [self.seen[i] for i in left])


class MemoryPool:
    """Reusable CPU memory by purpose. Safe with threads and re-entrant calls."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Keep nothing; also in a forked process, where another thread may have held the lock."""
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, torch.dtype], _Kept] = {}
        self._requests = 0

    def empty(self, purpose: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """See `Workspace`; for CPU tensors."""
        size = math.prod(shape) * like.element_size()
        with self._lock:
            self._requests += 1
            if self._requests % SWEEP == 0:  # a purpose or type that nothing asks for any more
                self._kept = {key: kept for key, kept in self._kept.items() if kept.sweep()}
            kept = self._kept.setdefault((purpose, like.dtype), _Kept())
            storage = kept.take(size)
            return torch.empty(0, dtype=like.dtype).set_(storage, 0, shape)  # type: ignore[call-overload]

    def clear(self) -> None:
        """Keep nothing: memory in use stays with its owners."""
        with self._lock:
            self._kept = {}

    def kept_bytes(self) -> dict[str, int]:
        """Bytes of the kept memory, in use or not, by purpose."""
        found: dict[str, int] = {}
        with self._lock:
            for (purpose, _), kept in self._kept.items():
                size = sum(storage.nbytes() for storage in kept.storages)
                found[purpose] = found.get(purpose, 0) + size
        return found


# Layers of a model know nothing of each other, and share a pool: it lives as long as one of them.
_POOLS: weakref.WeakValueDictionary[str, MemoryPool] = weakref.WeakValueDictionary()
_POOLS_LOCK = threading.Lock()


def _after_fork() -> None:
    global _POOLS_LOCK
    _POOLS_LOCK = threading.Lock()
    for pool in list(_POOLS.values()):
        pool.begin()


os.register_at_fork(after_in_child=_after_fork)


def shared_pool() -> MemoryPool:
    """The pool of this process."""
    with _POOLS_LOCK:
        pool = _POOLS.get("cpu")
        if pool is None:
            pool = _POOLS["cpu"] = MemoryPool()
        return pool


class Workspace:
    """What a module keeps between calls: reusable CPU memory by purpose, and state by its type.

    Copies (pickle, deepcopy) start without state. Safe with threads and re-entrant calls.

    Args:
        pool: where the memory comes from; None: the process's, which all modules share.
    """

    def __init__(self, pool: MemoryPool | None = None) -> None:
        self.pool = shared_pool() if pool is None else pool
        self._lock = threading.Lock()
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
        return self.pool.empty(purpose, shape, like)

    def clear(self) -> None:
        """Rebuild all states, and give back all memory that is free, other modules' too."""
        self.pool.clear()
        with self._lock:
            self._states = {}

    def kept_bytes(self) -> int:
        """Bytes of the pool's memory, in use or not."""
        return sum(self.pool.kept_bytes().values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        return Workspace()

    def __reduce__(self) -> tuple[Any, ...]:
        return Workspace, ()


def scratch(purpose: str, shape: tuple[int, ...], like: Tensor,
            dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised CPU tensor for the length of one operation, from the process's pool.

    For operations that belong to no module; `like` gives the device, and the dtype if none is
    given.
    """
    like = like if dtype is None else like.new_empty(0, dtype=dtype)
    return Workspace().empty(purpose, shape, like)


def _references(kept: list[torch.UntypedStorage], index: int) -> int:
    return sys.getrefcount(kept[index])


def _idle(kept: list[torch.UntypedStorage], index: int) -> bool:
    # only this list owns it, in C++ (tensors, saved activations) and in Python (storage objects)
    return _use_count(kept[index]._cdata) == 1 and _references(kept, index) == _ALONE


_ALONE = _references([torch.UntypedStorage(0)], 0)
