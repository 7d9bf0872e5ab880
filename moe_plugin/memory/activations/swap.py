"""Swapping: tensors that autograd saves for a block are stored in a slower memory tier.

The tensors that autograd saves are intercepted with torch's saved-tensor hooks. Entire storages are
copied instead of individual tensors. All views of a storage are therefore moved together. Views are
restored with their original strides and alignment, so gradients are bitwise equal. The copy of a
tensor to the tier starts when autograd saves the tensor. Usually, `fetch` starts the copy back to
the device before the tensor is needed. Without `fetch`, this copy starts when the backward pass
needs the tensor.
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

SMALLEST = 1 << 16  # in bytes; smaller storages stay on the device
# a view of a storage larger than this multiple of the view's size stays on the device
LARGEST_STORAGE = 4


class SwapError(RuntimeError):
    """Error that is raised if the activations of a block could not be copied to the tier or back to
    the device. The error message names the block and the reason.
    """


class Ledger:
    """A thread-safe counter of the current and peak activation bytes on the device."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Add `nbytes` to the current number. A negative `nbytes` is subtracted."""
        with self._lock:
            self.now += nbytes
            self.peak = max(self.peak, self.now)

    def restart(self) -> None:
        """Reset the peak to the current number."""
        with self._lock:
            self.peak = self.now


class SwappedStorage:
    """A storage saved by autograd that is copied to the tier and back to the device.

    Args:
        swapper: object that contains the tier, the copier and the ledger.
        block: name of the block that uses the storage, for use in messages.
        x: any tensor that uses the storage. The tensor must not change until the copy is complete.
    """

    def __init__(self, swapper: Swapper, block: str, x: Tensor) -> None:
        storage = x.untyped_storage()
        self.swapper, self.block, self.nbytes = swapper, block, storage.nbytes()
        self.key, self.version = StorageWeakRef(storage), x._version
        self._alias: Tensor | None = x.detach()  # shares the version counter
        whole: Any = x.new_empty(0, dtype=torch.uint8)  # the stubs of `set_` lack such storages
        self._source: Tensor | None = whole.set_(storage, 0, (self.nbytes,))
        self._held: TierTensor | None = None
        self._target: Tensor | None = None
        self._in: Ticket | None = None
        self._wanted = False
        self._lock = threading.Lock()
        swapper.ledger.add(self.nbytes)
        self._out = swapper.copier.start_call(self._put, self.nbytes)
        # a separate job, so that it runs after a throttle's delay
        self._left = swapper.copier.start_call(self._leave, 0)

    def holds(self, x: Tensor) -> bool:
        """Return whether this is the storage of `x` and `x` is unchanged since it was saved."""
        return not self.key.expired() and self.version == x._version

    def leave(self) -> None:
        """Wait until the storage has been copied to the tier and its memory on the device has been
        freed. Raises `SwapError` if the tier could not store the bytes.
        """
        self._wait(self._out, "out to")
        self._left.wait()

    def fetch(self) -> None:
        """Start copying the storage back to the device, unless it is still on the device."""
        with self._lock:
            self._wanted = True
            # after a change in place, only the tier has the values that were saved
            on_device = self._alias is not None and self._alias._version == self.version
        if not on_device and self._in is None:
            # allocated here, so that the memory belongs to this stream
            if self.swapper.copier.device.type == "cuda":
                self._allocate()
            self._in = self.swapper.copier.start_call(self._read, self.nbytes)

    def values(self) -> Tensor:
        """Wait for the bytes of the storage, and return them as a uint8 tensor [nbytes].

        Raises:
            SwapError: If the bytes could not be copied to the tier or back to the device.
        """
        self.fetch()
        if self._in is None:
            if self._out.done:
                self.leave()
            assert self._source is not None  # it is still on the device
            return self._source
        self._wait(self._in, "back from")
        assert self._target is not None
        return self._target

    def _wait(self, ticket: Ticket, where: str) -> None:
        try:
            ticket.wait()
        except KeyboardInterrupt:  # by the user
            raise
        except BaseException as error:
            raise self._error(where, error) from error

    def _put(self) -> None:
        assert self._source is not None and self._alias is not None
        held = self.swapper.tier.put(self._source)
        # changed in place during the copy, which may have mixed old and new values
        if self._alias._version != self.version:
            self.swapper.tier.free(held)
            raise _modified_error()
        self._held = held

    def _leave(self) -> None:
        with self._lock:
            # backward needs the storage already (it stays on the device), or the copy failed
            if self._wanted or self._held is None:
                return
            self._source = self._alias = None
        self.swapper.ledger.add(-self.nbytes)

    def _read(self) -> None:
        if self._held is None:
            raise _modified_error()
        target = self._allocate() if self._target is None else self._target
        self.swapper.tier.read_into(self._held, target)

    def _allocate(self) -> Tensor:
        self._target = target = torch.empty(self.nbytes, dtype=torch.uint8,
                                            device=self.swapper.copier.device)
        self.swapper.ledger.add(self.nbytes)
        return target

    def _error(self, where: str, error: BaseException) -> SwapError:
        # the job keeps its error, and the frames of the traceback would keep the graph that keeps
        # the job
        error.__traceback__ = None
        swap_error = SwapError(
            f"activations of block {self.block} ({self.nbytes} bytes) could not be copied {where} "
            f"the tier for swapped activations: {type(error).__name__}: {error}")
        if isinstance(error, OSError):  # other errors come from the model and occur on all ranks
            abort_job(swap_error)
        return swap_error

    def __del__(self) -> None:
        # `vars`, because a failed `__init__` leaves attributes unset
        on_device = [t for t in (vars(self).get("_source"), vars(self).get("_target"))
                     if t is not None]
        if on_device:
            self.swapper.ledger.add(-self.nbytes * len(on_device))
        held = vars(self).get("_held")
        if held is not None:
            self.swapper.tier.free(held)


def _modified_error() -> RuntimeError:
    return RuntimeError("a tensor that backward needs was modified by an inplace operation while "
                        "it was being copied; let the block create a new tensor instead, or use "
                        "the policy keep for the block")


@dataclass(frozen=True, eq=False)
class _View:
    """A tensor saved by autograd that is a view of a swapped storage."""

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
    """The state that all swapped passes of a process share.

    Args:
        tier: tier for the activations.
        copier: copier whose thread copies the activations. The copier's device is the device that
            computes the activations.
        smallest: smallest size in bytes of a storage that is swapped.

    Attributes:
        ledger: counter for the bytes of swapped storages that are currently on the device.
    """

    def __init__(self, tier: Tier, copier: Copier, smallest: int = SMALLEST) -> None:
        self.tier, self.copier, self.smallest = tier, copier, smallest
        self.ledger = Ledger()
        # Weak references, so that a storage is freed together with the graph that saved it.
        self._leaving: deque[tuple[int, ref[SwappedStorage]]] = deque()

    def leave(self, latest: int) -> None:
        """Wait for the copies to the tier of all passes up to and including the given pass number.

        Raises:
            SwapError: If a storage could not be copied to the tier.
        """
        while self._leaving and self._leaving[0][0] <= latest:
            storage = self._leaving.popleft()[1]()
            if storage is not None:  # otherwise the storage is no longer needed
                storage.leave()

    def started(self, number: int, storage: SwappedStorage) -> None:
        """Record that a copy to the tier has started in the pass with index `number`. `number` must
        not decrease between calls.
        """
        self._leaving.append((number, ref(storage)))

    def forget(self) -> None:
        """After an error, forget all copies to the tier, so that `leave` does not wait for them."""
        self._leaving.clear()

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a model has no activations
        return {"tier": self.tier, "copier": self.copier, "smallest": self.smallest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Swapper.__init__(self, **state)


class Saved:
    """The tensors that autograd saves during a forward pass of one block. Saved-tensor hooks
    intercept the tensors that autograd saves.

    Args:
        swapper: object that copies the tensors to the tier and back to the device.
        block: name of the block.
        number: index of the pass, which `Swapper.leave` uses.
        stays: tensors that are not swapped because they are not activations of the block, such as
            parameters and masks.

    Attributes:
        moved, stayed: total size in bytes of the storages that are swapped, and of the storages
            that stay on the device.
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
        """Return the context manager for the forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)

    def pack(self, x: Tensor) -> Tensor | _View:
        """Return the object that autograd stores in place of a tensor."""
        if not swappable(x):
            return x
        storage = x.untyped_storage()
        place, nbytes = storage.data_ptr(), storage.nbytes()
        if place in self._stays:
            return x
        if nbytes < self.swapper.smallest or nbytes > LARGEST_STORAGE * x.nbytes:
            self._kept[place] = min(nbytes, x.nbytes)
            return x
        return _View(self._storage(x, place), x.dtype, int(x.storage_offset()), tuple(x.shape),
                     x.stride())

    def fetch(self) -> None:
        """Start copying the storages back to the device, in the order the backward pass needs them.
        The storage that was saved last is copied first.
        """
        for reference in reversed(self._order):
            storage = reference()
            if storage is not None:
                storage.fetch()

    def _storage(self, x: Tensor, place: int) -> SwappedStorage:
        reference = self._storages.get(place)
        known = None if reference is None else reference()
        # an address can be reused after its storage was freed, so a match of addresses is not
        # enough
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
    """Return whether the bytes of a tensor's storage represent the tensor completely."""
    # A view that is rebuilt from bytes loses the conj and neg bits, and subclasses may have no
    # bytes.
    return (type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided
            and not x.is_quantized and not x.is_complex() and not x.is_neg()
            and not x.is_inference() and x.device.type in ("cpu", "cuda") and x.numel() > 0)

