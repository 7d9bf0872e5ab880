"""Saved tensors of a block that wait for its backward pass in a slower tier.

torch's saved-tensor hooks hand over what autograd saves. Storages are copied, not tensors: views of
one storage move once, and come back with the strides and the alignment that they had, so that
backward computes the same bits. A copy out starts where autograd saves; a copy in starts ahead of
use, by `fetch`, or where backward asks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moe_plugin.comm.watchdog import abort_job
from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.memory.tiers import Tier, TierTensor

SMALLEST = 1 << 16  # bytes; what is smaller stays
LARGEST_STORAGE = 4  # times a view's size; a part of a larger storage stays with it


class SwapError(RuntimeError):
    """Activations of a block could not leave or come back; the message names block and reason."""


class Ledger:
    """Bytes of activations on the device, now and at most; counted from any thread."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes that came, or went where negative."""
        with self._lock:
            self.now += nbytes
            self.peak = max(self.peak, self.now)

    def restart(self) -> None:
        """Begin a new peak."""
        with self._lock:
            self.peak = self.now


class SwappedStorage:
    """One storage that autograd saved, on its path to the tier and back.

    Args:
        swapper: with tier, copier and ledger.
        block: of the storage, for messages.
        x: a tensor in it, which must stay as it is until the copy is done.
    """

    def __init__(self, swapper: Swapper, block: str, x: Tensor) -> None:
        storage = x.untyped_storage()
        self.swapper, self.block, self.nbytes = swapper, block, storage.nbytes()
        self.key, self.version = StorageWeakRef(storage), x._version
        self._alias: Tensor | None = x.detach()  # has the same version counter
        self._source: Tensor | None = x.new_empty(0, dtype=torch.uint8).set_(
            storage, 0, (self.nbytes,))
        self._held: TierTensor | None = None
        self._target: Tensor | None = None
        self._in: Ticket | None = None
        self._wanted = False
        self._lock = threading.Lock()
        swapper.ledger.add(self.nbytes)
        self._out = swapper.copier.start_call(self._put, self.nbytes)
        # a job of its own, after what a throttle adds
        self._left = swapper.copier.start_call(self._leave, 0)

    def holds(self, x: Tensor) -> bool:
        """Whether it is x's storage, with the values that x has now."""
        return not self.key.expired() and self.version == x._version

    def leave(self) -> None:
        """Wait until it has left the device. `SwapError`: the tier did not take it."""
        self._wait(self._out, "out to")
        self._left.wait()

    def fetch(self) -> None:
        """Start to copy in, if the storage is not there."""
        with self._lock:
            self._wanted = True
            there = self._source is not None and self._alias._version == self.version
        if not there and self._in is None:
            if self.swapper.copier.device.type == "cuda":  # of this stream's memory
                self._allocate()
            self._in = self.swapper.copier.start_call(self._read, self.nbytes)

    def values(self) -> Tensor:
        """The storage's bytes, uint8 [nbytes]; the caller waits for them. `SwapError`: they did not
        leave, or did not come back.
        """
        self.fetch()
        if self._in is None:
            if self._out.done:
                self.leave()
            return self._source
        self._wait(self._in, "back from")
        return self._target

    def _wait(self, ticket: Ticket, where: str) -> None:
        try:
            ticket.wait()
        except KeyboardInterrupt:  # of the user
            raise
        except BaseException as error:
            raise self._error(where, error) from error

    def _put(self) -> None:
        held = self.swapper.tier.put(self._source)
        if self._alias._version != self.version:
            self.swapper.tier.free(held)
            raise _changed()
        self._held = held

    def _leave(self) -> None:
        with self._lock:
            if self._wanted or self._held is None:
                return
            self._source = self._alias = None
        self.swapper.ledger.add(-self.nbytes)

    def _read(self) -> None:
        if self._held is None:
            raise _changed()
        if self._target is None:
            self._allocate()
        self.swapper.tier.read_into(self._held, self._target)

    def _allocate(self) -> None:
        self._target = torch.empty(self.nbytes, dtype=torch.uint8,
                                   device=self.swapper.copier.device)
        self.swapper.ledger.add(self.nbytes)

    def _error(self, where: str, error: BaseException) -> SwapError:
        # a job keeps its error, whose frames keep the graph that keeps the job
        error.__traceback__ = None
        swap_error = SwapError(
            f"activations of block {self.block} ({self.nbytes} bytes) did not get {where} the tier "
            f"for swapped activations: {type(error).__name__}: {error}")
        if isinstance(error, OSError):  # others are of the model, and the same on all ranks
            abort_job(swap_error)
        return swap_error

    def __del__(self) -> None:
        on_device = [t for t in (vars(self).get("_source"), vars(self).get("_target"))
                     if t is not None]
        if on_device:
            self.swapper.ledger.add(-self.nbytes * len(on_device))
        if vars(self).get("_held") is not None:
            self.swapper.tier.free(self._held)


def _changed() -> RuntimeError:
    return RuntimeError("a tensor that backward needs was modified by an inplace operation while "
                        "it was copied; let the block make a new tensor instead, or keep its "
                        "activations")


@dataclass(frozen=True, eq=False)
class _View:
    """A saved tensor in a swapped storage."""

    storage: SwappedStorage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        bytes_N = self.storage.values()
        with torch.no_grad():
            return torch.empty(0, dtype=self.dtype, device=bytes_N.device).set_(
                bytes_N.untyped_storage(), self.offset, self.size, self.stride)


class Swapper:
    """What the swapped passes of a process share.

    Args:
        tier: where activations wait.
        copier: its thread moves them; its device is theirs.
        smallest: bytes of a storage that is worth a copy.

    Attributes:
        ledger: bytes on the device of storages that are swapped.
    """

    def __init__(self, tier: Tier, copier: Copier, smallest: int = SMALLEST) -> None:
        self.tier, self.copier, self.smallest = tier, copier, smallest
        self.ledger = Ledger()
        self._leaving: deque[tuple[int, ref[SwappedStorage]]] = deque()

    def leave(self, latest: int) -> None:
        """Wait for the copies out of all passes up to a number.

        Raises: SwapError: see `SwappedStorage.leave`.
        """
        while self._leaving and self._leaving[0][0] <= latest:
            storage = self._leaving.popleft()[1]()
            if storage is not None:  # else nothing needs it any more
                storage.leave()

    def started(self, number: int, storage: SwappedStorage) -> None:
        """Note a copy out that the pass of this number has started; numbers never fall."""
        self._leaving.append((number, ref(storage)))

    def forget(self) -> None:
        """After an error: wait for nothing that was on its path out."""
        self._leaving.clear()

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a model has no activations
        return {"tier": self.tier, "copier": self.copier, "smallest": self.smallest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


class Saved:
    """The tensors that autograd saves in one forward pass of one block: hooks, and what they saw.

    Args:
        swapper: where tensors go.
        block: its name.
        number: of the pass, for `Swapper.leave`.
        stays: tensors that are not the block's own: parameters, masks.

    Attributes:
        moved, stayed: bytes of the storages that go, and of those that stay on the device.
    """

    def __init__(self, swapper: Swapper, block: str, number: int,
                 stays: Iterable[Tensor]) -> None:
        self.swapper, self.block, self.number = swapper, block, number
        self._stays = {x.untyped_storage().data_ptr() for x in stays if swappable(x)}
        self._storages: dict[int, ref[SwappedStorage]] = {}
        self._order: list[ref[SwappedStorage]] = []
        self._kept: dict[int, int] = {}
        self.moved = 0

    @property
    def stayed(self) -> int:
        return sum(self._kept.values())

    def hooks(self) -> Any:
        """The context in which a forward pass runs."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)

    def pack(self, x: Tensor) -> Tensor | _View:
        """What autograd keeps instead of a tensor."""
        if not swappable(x):
            return x
        storage = x.untyped_storage()
        place, nbytes = storage.data_ptr(), storage.nbytes()
        if place in self._stays:
            return x
        if nbytes < self.swapper.smallest or nbytes > LARGEST_STORAGE * x.nbytes:
            self._kept[place] = min(nbytes, x.nbytes)
            return x
        return _View(self._storage(x, place), x.dtype, x.storage_offset(), tuple(x.shape),
                     x.stride())

    def fetch(self) -> None:
        """Start to copy in what backward will ask for, the last first."""
        for reference in reversed(self._order):
            storage = reference()
            if storage is not None:
                storage.fetch()

    def _storage(self, x: Tensor, place: int) -> SwappedStorage:
        reference = self._storages.get(place)
        known = None if reference is None else reference()
        if known is None or not known.holds(x):
            known = SwappedStorage(self.swapper, self.block, x)
            self._storages[place] = ref(known)
            self._order.append(ref(known))
            self.moved += known.nbytes
            self.swapper.started(self.number, known)
        return known


def _unpack(saved: Tensor | _View) -> Tensor:
    return saved.tensor() if isinstance(saved, _View) else saved


def swappable(x: Tensor) -> bool:
    """Whether a tensor is bytes in a storage, and nothing else."""
    return (type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided
            and not x.is_quantized and not x.is_complex() and not x.is_neg()
            and not x.is_inference() and x.device.type in ("cpu", "cuda") and x.numel() > 0)

