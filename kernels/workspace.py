"""Reusable memory for large CPU tensors. Reusing memory avoids page faults in every step.

For every large tensor, glibc maps new memory, and the operating system clears each page on first
access. Clearing the pages takes about 60 us per MiB, which is longer than writing the values. A
`Workspace` retains the memory of large tensors and reuses it as soon as it is no longer referenced.
Callers do not have to release memory explicitly, because the reference count of each storage is
checked. Memory is therefore never reused while it contains a saved activation, a gradient that the
user retains, or a tensor that is needed again by the same graph. While memory cannot be reused,
requests receive different memory.

All modules of a process share one `MemoryPool`, so that memory that one layer no longer needs can
be used by the next layer. The layers of a model therefore retain only as much memory as they use at
any one time, rather than the sum of each layer's maximum.
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
SHRINK = 4  # free memory is not used for requests smaller than 1/4 of its size
SWEEP = 4096  # requests between two searches for purposes without any further request
PATIENCE = 64  # minimum of unsuccessful requests before free memory is released; see `_Kept`
# Exists in torch >= 2.1. Without this function no memory is retained.
_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)


@dataclass
class _Kept:
    """The memory that is reserved for one purpose and one data type.

    Attributes:
        storages: all storages, both free and in use.
        seen: for each storage, the number of the last request at which the storage was in use.
        requests: number of requests so far.
        swept: the value of `requests` at the last sweep.
    """

    storages: list[torch.UntypedStorage] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    requests: int = 0
    swept: int = 0

    def take(self, size: int) -> torch.UntypedStorage:
        """Return the smallest free storage of at least `size` bytes, or a new storage.

        A new storage replaces a free storage that is slightly too small. For each size, there are
        therefore never more storages than have been in use at the same time. A storage is released
        if it has not been used for more than `PATIENCE` requests, and for more than twice as many
        requests as there are storages.
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
        # 1/8 more than requested, because loads change from step to step.
        self.storages.append(torch.UntypedStorage(size + size // 8))
        self.seen.append(self.requests)
        return self.storages[-1]

    def _free(self) -> list[int]:
        """Return the indices of the free storages.

        Storages that have been free for too long, or that are shared with other processes, are
        removed.
        """
        free, old = [], set()
        patience = max(PATIENCE, 2 * len(self.storages))
        for index, seen in enumerate(self.seen):
            # Another process may still use a storage in shared memory, which no count here shows.
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
        """Release storages that were not used since the last sweep. Return true if storages remain.
        """
        unused = self.requests == self.swept
        self.swept = self.requests
        if unused:
            self._drop({i for i in range(len(self.storages)) if _idle(self.storages, i)})
        return bool(self.storages)

    def _drop(self, gone: set[int]) -> None:
        left = [i for i in range(len(self.storages)) if i not in gone]
        self.storages, self.seen = ([self.storages[i] for i in left], [self.seen[i] for i in left])


class MemoryPool:
    """A pool of reusable CPU memory. Memory is reused only for the same purpose. Concurrent and
    re-entrant calls are supported.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset the pool: remove all memory and create a new lock.

        A forked process must call this method, because another thread of the parent process may
        have held the lock.
        """
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, torch.dtype], _Kept] = {}
        self._requests = 0

    def empty(self, purpose: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialized CPU tensor; see `Workspace.empty`."""
        size = math.prod(shape) * like.element_size()
        with self._lock:
            self._requests += 1
            if self._requests % SWEEP == 0:  # drop purposes and dtypes without any further request
                self._kept = {key: kept for key, kept in self._kept.items() if kept.sweep()}
            kept = self._kept.setdefault((purpose, like.dtype), _Kept())
            storage = kept.take(size)
            return torch.empty(0, dtype=like.dtype).set_(storage, 0, shape)  # type: ignore[call-overload]

    def clear(self) -> None:
        """Retain no memory. Memory that is in use remains valid."""
        with self._lock:
            self._kept = {}

    def kept_bytes(self) -> dict[str, int]:
        """Return the number of bytes retained for each purpose, including memory in use."""
        sizes: dict[str, int] = {}
        with self._lock:
            for (purpose, _), kept in self._kept.items():
                size = sum(storage.nbytes() for storage in kept.storages)
                sizes[purpose] = sizes.get(purpose, 0) + size
        return sizes


# All layers share one pool without references to each other. The weak reference frees the pool
# with its last layer.
_POOLS: weakref.WeakValueDictionary[str, MemoryPool] = weakref.WeakValueDictionary()
_POOLS_LOCK = threading.Lock()


def _after_fork() -> None:
    global _POOLS_LOCK
    _POOLS_LOCK = threading.Lock()
    for pool in list(_POOLS.values()):
        pool.begin()


os.register_at_fork(after_in_child=_after_fork)


def shared_pool() -> MemoryPool:
    """Return the memory pool of this process."""
    with _POOLS_LOCK:
        pool = _POOLS.get("cpu")
        if pool is None:
            pool = _POOLS["cpu"] = MemoryPool()
        return pool


class Workspace:
    """Data that a module retains between calls: CPU memory for reuse, and state objects.

    A copy of a workspace (made by pickle or deepcopy) starts empty. Concurrent and re-entrant calls
    are supported.

    Args:
        pool: memory pool that the workspace uses. By default, all modules share the pool of the
            process.
    """

    def __init__(self, pool: MemoryPool | None = None) -> None:
        self.pool = shared_pool() if pool is None else pool
        self._lock = threading.Lock()
        self._states: dict[type, Any] = {}

    def state(self, kind: type[T]) -> T:
        """Return the module's state object of this type, created without arguments on first use."""
        with self._lock:
            if kind not in self._states:
                self._states[kind] = kind()
            return self._states[kind]

    def empty(self, purpose: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialized tensor of a given shape, with the dtype and device of `like`.

        Free memory for the same `purpose` is reused.
        """
        size = math.prod(shape) * like.element_size()
        reusable = like.device.type == "cpu" and size >= SMALL_BYTES and _use_count is not None
        if not reusable or torch.compiler.is_compiling():
            return like.new_empty(shape)
        return self.pool.empty(purpose, shape, like)

    def clear(self) -> None:
        """Discard all state objects, and release the free memory of all modules."""
        self.pool.clear()
        with self._lock:
            self._states = {}

    def kept_bytes(self) -> int:
        """Return the size of the pool's memory in bytes, including memory in use."""
        return sum(self.pool.kept_bytes().values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        return Workspace()

    def __reduce__(self) -> tuple[Any, ...]:
        return Workspace, ()


def scratch(purpose: str, shape: tuple[int, ...], like: Tensor,
            dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized CPU tensor from the pool of the process. The tensor may be used only
    during one operation.

    Use this function in operations that are not part of a module. The tensor `like` determines the
    device, and also the dtype if `dtype` is None.
    """
    like = like if dtype is None else like.new_empty(0, dtype=dtype)
    return Workspace().empty(purpose, shape, like)


def _references(kept: list[torch.UntypedStorage], index: int) -> int:
    return sys.getrefcount(kept[index])


def _idle(kept: list[torch.UntypedStorage], index: int) -> bool:
    # Free means that only this list owns the storage, both in C++ (tensors, saved activations) and
    # in Python (storage objects).
    return _use_count(kept[index]._cdata) == 1 and _references(kept, index) == _ALONE


# The count that `_references` reports for a storage without further owners. It is measured, because
# it differs between Python versions.
_ALONE = _references([torch.UntypedStorage(0)], 0)
