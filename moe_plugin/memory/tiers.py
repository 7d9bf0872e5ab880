"""Tiers, which store tensors outside the device, either in host memory or in files.

Files are not memory-mapped. Tensors are read from and written to files through buffers, so only
memory that is actually used counts toward memory limits.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.utils.regular_files import make_folder, read_at, write_remedy


class TierError(OSError):
    """Error that is raised if a tier cannot store or read a tensor. The error message names the
    size, the location and a remedy.
    """


@dataclass(frozen=True, eq=False)
class TierTensor:
    """A tensor that is stored in a tier.

    Attributes:
        shape, dtype: shape and dtype of the tensor.
        tensor: the tensor in host memory, or None if the data is stored in a file.
        file, offset: descriptor of the open file that contains the data, and the offset of the data
            in the file in bytes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None
    file: int = -1
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def in_memory(self) -> Tensor:
        """The tensor in host memory. Must not be used if the data is stored in a file."""
        assert self.tensor is not None
        return self.tensor


class Tier(ABC):
    """Base class of memory tiers, which are larger and slower than device memory."""

    def put(self, x: Tensor) -> TierTensor:
        """Store a copy of `x`, and wait for it. Raises `TierError` if there is no space."""
        held = self._room(x)
        self._write([(held, x)])
        return held

    def put_later(self, copier: Copier, tensors: Sequence[Tensor]
                  ) -> tuple[list[TierTensor], Ticket]:
        """Start storing several tensors in the background.

        The tensors must not change until the ticket is done. The tensors are stored once the caller
        has waited for the ticket. Waiting for the ticket raises `TierError` if the tier has no
        space.
        """
        held = [self._room(x) for x in tensors]
        pairs = list(zip(held, tensors, strict=True))
        return held, copier.start_call(lambda: self._write(pairs), sum(h.nbytes for h in held))

    @abstractmethod
    def _room(self, x: Tensor) -> TierTensor:
        """Allocate space in the tier for the tensor `x`."""

    @abstractmethod
    def _write(self, pairs: Sequence[tuple[TierTensor, Tensor]]) -> None:
        """Write tensors to the space that has been allocated for them.

        If there is no space for one of the tensors, the space for all tensors of this call is
        freed.
        """

    @abstractmethod
    def read_into(self, held: TierTensor, target: Tensor) -> None:
        """Copy a stored tensor into `target`, and wait until the copy is complete. `target` must
        have the same shape, but may have any dtype and any device.
        """

    def fetch(self, copier: Copier, wanted: Sequence[tuple[Tensor, TierTensor]],
              after: Ticket | None = None) -> Ticket:
        """In the background, call `read_into` for all pairs (target, held) in order.

        after: ticket of the job that stores the tensors. If the `after` job fails, the job started
            here fails with the same error.
        """
        wanted = list(wanted)

        def read() -> None:
            if after is not None:
                after.wait()
            for target, held in wanted:
                self.read_into(held, target)

        return copier.start_call(read, sum(held.nbytes for _, held in wanted))

    def take(self, held: Sequence[TierTensor]) -> list[Tensor]:
        """Move stored tensors to memory and free their space. If this method raises `TierError`,
        all tensors remain stored in the tier.
        """
        made = [torch.empty(stored.shape, dtype=stored.dtype) for stored in held]
        for stored, target in zip(held, made, strict=True):
            self.read_into(stored, target)
        for stored in held:
            self.free(stored)
        return made

    def free(self, held: TierTensor) -> None:
        """Free the space of a stored tensor. The stored tensor must not be used afterwards."""

    def close(self) -> None:
        """Free all space."""


class HostTier(Tier):
    """A tier in host memory. The memory is pinned if the device is a GPU.

    Torch allocates the pinned memory and reuses it for tensors of about the same size. For memory
    that is needed for the whole lifetime of a model, use `machine.pinned_buffer` instead.

    Args:
        device: source or target device of the copies.

    Attributes:
        `pinned_for`: GPU that accesses the memory, or None if the device is a CPU.
    """

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self.pinned_for = device if device.type == "cuda" else None

    def put_later(self, copier: Copier, tensors: Sequence[Tensor]
                  ) -> tuple[list[TierTensor], Ticket]:
        held = [self._room(x) for x in tensors]
        return held, copier.start([(h.in_memory, x.detach()) for h, x in
                                   zip(held, tensors, strict=True)])

    def take(self, held: Sequence[TierTensor]) -> list[Tensor]:
        """See `Tier`. The tensors of this tier are already in memory, so no data is moved."""
        return [stored.in_memory for stored in held]

    def read_into(self, held: TierTensor, target: Tensor) -> None:
        with torch.no_grad():
            target.copy_(held.in_memory)

    def fetch(self, copier: Copier, wanted: Sequence[tuple[Tensor, TierTensor]],
              after: Ticket | None = None) -> Ticket:
        """See `Tier`. Copies from existing host memory cannot fail, so `after` is not needed."""
        return copier.start([(target, held.in_memory) for target, held in wanted])

    def _write(self, pairs: Sequence[tuple[TierTensor, Tensor]]) -> None:
        for held, x in pairs:
            held.in_memory.copy_(x.detach())

    def _room(self, x: Tensor) -> TierTensor:
        try:
            room = torch.empty(x.shape, dtype=x.dtype, pin_memory=self.pinned_for is not None)
        except RuntimeError as error:
            raise TierError(
                errno.ENOMEM, f"{x.numel() * x.element_size()} bytes do not fit into host memory "
                              f"({error}); store less in host memory, or use the disk") from error
        return TierTensor(tuple(x.shape), x.dtype, room)


class DiskTier(Tier):
    """A tier that stores all tensors in a single unnamed file in a folder.

    The operating system deletes the file when the process ends, even after a crash.

    Args:
        folder: folder on disk for the file. The folder is created if it does not exist.
    Raises:
        ValueError: If the folder cannot be created.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = make_folder(Path(folder))
        self._lock = threading.Lock()
        self._file: Any = None
        # free offsets by size: space is reused only for tensors of exactly the same size
        self.end = 0
        self._free: dict[int, list[int]] = {}

    def read_into(self, held: TierTensor, target: Tensor) -> None:
        """See `Tier`. Raises `TierError` if the file was truncated."""
        read_values(held, target, str(self.folder))

    def free(self, held: TierTensor) -> None:
        """See `Tier`. The freed space is reused for the next tensor that has the same size."""
        with self._lock:
            self._free.setdefault(held.nbytes, []).append(held.offset)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file, self.end, self._free = None, 0, {}

    def _room(self, x: Tensor) -> TierTensor:
        nbytes = x.numel() * x.element_size()
        with self._lock:
            if self._file is None:
                self._file = self._new_file()
            free = self._free.get(nbytes)
            if free:
                offset = free.pop()
            else:
                offset, self.end = self.end, self.end + nbytes
            return TierTensor(tuple(x.shape), x.dtype, file=self._file.fileno(), offset=offset)

    def _new_file(self) -> Any:
        try:
            return tempfile.TemporaryFile(dir=self.folder)
        except OSError as error:
            raise TierError(error.errno, f"no file can be created in {self.folder} "
                                         f"({error.strerror}); "
                                         f"{write_remedy(error, self.folder)}") from error

    def _write(self, pairs: Sequence[tuple[TierTensor, Tensor]]) -> None:
        for held, x in pairs:
            try:
                write_values(held.file, held.offset, x)
            except OSError as error:
                for place, _ in pairs:
                    self.free(place)
                raise TierError(
                    error.errno, f"{held.nbytes} bytes do not fit into {self.folder} "
                                 f"({error.strerror}); "
                                 f"{write_remedy(error, self.folder)}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}  # a copy creates a separate file

    def __setstate__(self, state: dict[str, Any]) -> None:
        DiskTier.__init__(self, state["folder"])


class TierBuffer:
    """A buffer that is stored in a tier and can be replaced in the background.

    The old buffer is kept until the new buffer is complete.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.held: TierTensor | None = None
        self._before: TierTensor | None = None
        self._ticket: Ticket | None = None

    def put(self, flat_N: Tensor) -> None:
        """Store a copy of the buffer, and wait until the copy is complete."""
        self.stage(flat_N)(True)

    def stage(self, flat_N: Tensor) -> Callable[[bool], None]:
        """Store a copy of the buffer in addition to the current copy. Call the returned function
        with True to use the new copy, or with False to discard it.
        """
        self.settle()
        new = self.tier.put(flat_N)

        def finish(taken: bool) -> None:
            if taken:
                self.held, dropped = new, self.held
            else:
                dropped = new
            if dropped is not None:
                self.tier.free(dropped)

        return finish

    def put_later(self, copier: Copier, flat_N: Tensor) -> Ticket:
        """Start storing a copy of the buffer in the background. `settle` waits for the copy."""
        self.settle()
        # stays valid until `settle`, which restores it if the write fails
        self._before = self.held
        [self.held], self._ticket = self.tier.put_later(copier, [flat_N])
        return self._ticket

    def fetch(self, copier: Copier, flat_N: Tensor) -> Ticket:
        """Start copying the stored buffer into another buffer of the same size."""
        # the read must wait for a write that is in progress
        assert self.held is not None
        return self.tier.fetch(copier, [(flat_N, self.held)], self._ticket)

    def read(self, flat_N: Tensor) -> None:
        """Copy the stored buffer into another buffer of the same size, and wait for the copy."""
        self.settle()
        assert self.held is not None
        self.tier.read_into(self.held, flat_N)

    def settle(self) -> None:
        """Wait until the copy started by `put_later` is complete. Raises `TierError` if the tier
        had no space, in which case the old buffer is still stored.
        """
        if self._ticket is None:
            return
        ticket, before = self._ticket, self._before
        self._ticket = self._before = None
        try:
            ticket.wait()
        except BaseException:
            self.held = before
            raise
        if before is not None:
            self.tier.free(before)


def tier_of(device: torch.device | str, folder: str | os.PathLike[str] | None = None) -> Tier:
    """Return a tier for the tensors of a device. The tier is in host memory for a GPU, and in files
    for a CPU.

    folder: folder on disk for the files. Defaults to the system's folder for temporary files.
    """
    if torch.device(device).type == "cuda":
        return HostTier(device)
    return DiskTier(tempfile.gettempdir() if folder is None else folder)


def write_values(file: int, offset: int, x: Tensor) -> None:
    """Write the data of a tensor to an open file. Raises `OSError` if the disk is full."""
    values = _bytes(x.detach().to("cpu").contiguous())
    # a call may write only a part, for example if the disk becomes full; the next call then fails
    while values:
        written = os.pwrite(file, values, offset)
        values, offset = values[written:], offset + written


def read_values(held: TierTensor, target: Tensor, name: str) -> None:
    """Read a tensor from a file into `target`. `target` must have the same shape, but may have any
    dtype and any device.

    name: name of the file or folder, for use in the error message.
    Raises:
        TierError: If the file is too short or cannot be read.
    """
    # the file is read directly into the target if no conversion is needed
    direct = (target.device.type == "cpu" and target.dtype == held.dtype
              and target.is_contiguous())
    pinned = target.device.type == "cuda"
    buffer = target.detach() if direct else torch.empty(
        held.shape, dtype=held.dtype, pin_memory=pinned)
    try:
        missing = read_at(held.file, _bytes(buffer), held.offset)
    except OSError as error:
        raise TierError(error.errno, f"{name}: {held.nbytes} bytes at offset {held.offset} cannot "
                                     f"be read ({error.strerror}); check the disk") from error
    if missing:
        raise TierError(errno.EIO, f"{name} ends {missing} bytes before the end of a tensor of "
                                   f"{held.nbytes} bytes: it was changed or truncated; write it "
                                   "again")
    if not direct:
        with torch.no_grad():
            target.copy_(buffer, non_blocking=pinned)
        if pinned:  # the copy must end before the buffer is freed on return
            torch.cuda.current_stream(target.device).synchronize()


def _bytes(x: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor as a memoryview of its bytes."""
    return x.reshape(-1).view(torch.uint8).numpy().data if x.numel() else memoryview(b"")
