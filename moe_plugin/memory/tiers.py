"""Where tensors lie when they are not on the device: host memory, or files that are not mapped.

Files are read into buffers and written from them, so that a memory limit counts what is resident.
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
    """A tier cannot hold or give back a tensor; the message names it, the place and the remedy."""


@dataclass(frozen=True, eq=False)
class TierTensor:
    """A tensor in a tier.

    Attributes:
        shape, dtype: of its values.
        tensor: in host memory; None: in a file.
        file, offset: an open file's descriptor and the first byte of the values in it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None
    file: int = -1
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Tier(ABC):
    """A place for tensors that is larger and slower than the device."""

    def put(self, x: Tensor) -> TierTensor:
        """Hold a copy of x; the caller waits. `TierError`: there is no room, and x is as it was."""
        held = self._room(x)
        self._write([(held, x)])
        return held

    def put_later(self, copier: Copier, tensors: Sequence[Tensor]
                  ) -> tuple[list[TierTensor], Ticket]:
        """The same of several in the background; they must stay as they are, and are only held when
        the ticket has been waited for, which raises `TierError` without room.
        """
        held = [self._room(x) for x in tensors]
        pairs = list(zip(held, tensors, strict=True))
        return held, copier.start_call(lambda: self._write(pairs), sum(h.nbytes for h in held))

    @abstractmethod
    def _room(self, x: Tensor) -> TierTensor:
        """A place for x."""

    @abstractmethod
    def _write(self, pairs: Sequence[tuple[TierTensor, Tensor]]) -> None:
        """Write tensors to their places; the places of all are free where one does not fit."""

    @abstractmethod
    def read_into(self, held: TierTensor, target: Tensor) -> None:
        """Copy what is held into a tensor of its shape, of any dtype and device; the caller waits.
        """

    def fetch(self, copier: Copier, wanted: Sequence[tuple[Tensor, TierTensor]],
              after: Ticket | None = None) -> Ticket:
        """`read_into` of all (target, held) in the background, in order.

        after: the job that puts them there; if that failed, this one fails with its error.
        """
        wanted = list(wanted)

        def read() -> None:
            if after is not None:
                after.wait()
            for target, held in wanted:
                self.read_into(held, target)

        return copier.start_call(read, sum(held.nbytes for _, held in wanted))

    def take(self, held: Sequence[TierTensor]) -> list[Tensor]:
        """What is held, in memory, and no longer here; the caller waits. `TierError`: all of it is
        still here.
        """
        made = [torch.empty(one.shape, dtype=one.dtype) for one in held]
        for one, target in zip(held, made, strict=True):
            self.read_into(one, target)
        for one in held:
            self.free(one)
        return made

    def free(self, held: TierTensor) -> None:
        """Give the room back; `held` must not be used any more."""

    def close(self) -> None:
        """Give everything back."""


class HostTier(Tier):
    """Host memory, pinned where the device is a GPU: by torch, which keeps it for the next tensor
    of about its size. What lives as long as a model has a `machine.pinned_buffer` instead.

    Args:
        device: from and to which tensors are copied.

    Attributes: `pinned_for`, the GPU that reaches it; None: there is none.
    """

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self.pinned_for = device if device.type == "cuda" else None

    def put_later(self, copier: Copier, tensors: Sequence[Tensor]
                  ) -> tuple[list[TierTensor], Ticket]:
        held = [self._room(x) for x in tensors]
        return held, copier.start([(h.tensor, x.detach()) for h, x in
                                   zip(held, tensors, strict=True)])

    def take(self, held: Sequence[TierTensor]) -> list[Tensor]:
        """See `Tier`: it is in memory."""
        return [one.tensor for one in held]

    def read_into(self, held: TierTensor, target: Tensor) -> None:
        with torch.no_grad():
            target.copy_(held.tensor)

    def fetch(self, copier: Copier, wanted: Sequence[tuple[Tensor, TierTensor]],
              after: Ticket | None = None) -> Ticket:
        """See `Tier`: copies into memory that is there do not fail."""
        return copier.start([(target, held.tensor) for target, held in wanted])

    def _write(self, pairs: Sequence[tuple[TierTensor, Tensor]]) -> None:
        for held, x in pairs:
            held.tensor.copy_(x.detach())

    def _room(self, x: Tensor) -> TierTensor:
        try:
            room = torch.empty(x.shape, dtype=x.dtype, pin_memory=self.pinned_for is not None)
        except RuntimeError as error:
            raise TierError(
                errno.ENOMEM, f"{x.numel() * x.element_size()} bytes do not fit host memory "
                f"({error}); keep less there, or use the disk") from error
        return TierTensor(tuple(x.shape), x.dtype, room)


class DiskTier(Tier):
    """One file in a folder, without a name: it goes with the process, however that ends.

    Args:
        folder: on a disk; made where it is missing.
    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = make_folder(Path(folder))
        self._lock = threading.Lock()
        self._file: Any = None
        self.end, self._free = 0, {}

    def read_into(self, held: TierTensor, target: Tensor) -> None:
        """See `Tier`; `TierError` where the file is shorter than what it held."""
        read_values(held, target, str(self.folder))

    def free(self, held: TierTensor) -> None:
        """See `Tier`: the next tensor of this size is written there."""
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
            raise TierError(error.errno, f"no file can be made in {self.folder} ({error.strerror});"
                            f" {write_remedy(error, self.folder)}") from error

    def _write(self, pairs: Sequence[tuple[TierTensor, Tensor]]) -> None:
        for held, x in pairs:
            try:
                write_values(held.file, held.offset, x)
            except OSError as error:
                for place, _ in pairs:
                    self.free(place)
                raise TierError(
                    error.errno, f"{held.nbytes} bytes do not fit {self.folder} "
                    f"({error.strerror}); {write_remedy(error, self.folder)}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}  # a copy has a file of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])


class TierBuffer:
    """A buffer in a tier, and a newer one that is on its way there: the older one stays until the
    newer one is complete.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.held: TierTensor | None = None
        self._before: TierTensor | None = None
        self._ticket: Ticket | None = None

    def put(self, flat_N: Tensor) -> None:
        """Hold a copy of the buffer; the caller waits."""
        self.stage(flat_N)(True)

    def stage(self, flat_N: Tensor) -> Callable[[bool], None]:
        """Hold a copy next to the present one; what is returned takes it (True) or drops it."""
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
        """`put` in the background; `settle` ends it."""
        self.settle()
        self._before = self.held
        [self.held], self._ticket = self.tier.put_later(copier, [flat_N])
        return self._ticket

    def fetch(self, copier: Copier, flat_N: Tensor) -> Ticket:
        """Start to copy it into a buffer of its size."""
        return self.tier.fetch(copier, [(flat_N, self.held)], self._ticket)

    def read(self, flat_N: Tensor) -> None:
        """Copy it into a buffer of its size; the caller waits."""
        self.settle()
        self.tier.read_into(self.held, flat_N)

    def settle(self) -> None:
        """Wait for what is on its way. `TierError`: it did not fit; the older one is held."""
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
    """Where tensors of a device wait: host memory of a GPU's, files of a CPU's.

    folder: of the files, on a disk; None: the folder for temporary files.
    """
    if torch.device(device).type == "cuda":
        return HostTier(device)
    return DiskTier(tempfile.gettempdir() if folder is None else folder)


def write_values(file: int, offset: int, x: Tensor) -> None:
    """Write a tensor's values into an open file. `OSError`: they do not fit."""
    values = _bytes(x.detach().to("cpu").contiguous())
    while values:
        written = os.pwrite(file, values, offset)
        values, offset = values[written:], offset + written


def read_values(held: TierTensor, target: Tensor, name: str) -> None:
    """Read what a file holds into a tensor of its shape, of any dtype and device.

    name: of the file or folder, for the message.
    Raises: TierError: the file is too short, or cannot be read.
    """
    direct = (target.device.type == "cpu" and target.dtype == held.dtype
              and target.is_contiguous())
    pinned = target.device.type == "cuda"
    buffer = target.detach() if direct else torch.empty(
        held.shape, dtype=held.dtype, pin_memory=pinned)
    try:
        missing = read_at(held.file, _bytes(buffer), held.offset)
    except OSError as error:
        raise TierError(error.errno, f"{name}: {held.nbytes} bytes at {held.offset} cannot be read "
                        f"({error.strerror}); check the disk") from error
    if missing:
        raise TierError(errno.EIO, f"{name} ends {missing} bytes before the end of a tensor of "
                        f"{held.nbytes}: it was changed or truncated; write it again")
    if not direct:
        with torch.no_grad():
            target.copy_(buffer, non_blocking=pinned)
        if pinned:  # the buffer goes when this returns
            torch.cuda.current_stream(target.device).synchronize()


def _bytes(x: Tensor) -> memoryview:
    """A contiguous tensor's own memory."""
    return memoryview(x.reshape(-1).view(torch.uint8).numpy()) if x.numel() else memoryview(b"")
