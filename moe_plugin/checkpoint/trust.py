"""Loading files that others wrote: only plain values and listed classes, so that no code in them
runs.
"""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import _weights_only_unpickler as of_torch
from torch.serialization import get_safe_globals, safe_globals

from moe_plugin.utils.messages import short

FLAG = "--trust-checkpoint"
torch_load = torch.load  # a host's process may restrict the name in torch itself
_LEGACY = 4  # pickles before the tensors in a file of `torch.save` that is not a zip file


class UntrustedFile(ValueError):
    """A file needs classes that are not listed: loading it could run code."""

    def __init__(self, what: str, classes: Iterable[str]) -> None:
        super().__init__(
            f"{what} holds {short(', '.join(sorted(classes)))}: loading it can run code that is in "
            f"the file, so it is refused; where you know who wrote it, give {FLAG}")


def load(file: Any, allowed: Iterable[Any], what: str, **options: Any) -> Any:
    """`torch.load` of plain values, tensors and `allowed` classes.

    Args:
        file: path or stream.
        allowed: classes and functions that its pickle may name.
        what: what errors call it.
        options: for `torch.load`.
    Raises:
        UntrustedFile: it names others. What `torch.load` raises: it is damaged.
        ValueError: it would need more memory than its size.
    """
    check_sizes(file, what)
    known = {*get_safe_globals()}
    # leaving `safe_globals` forgets all that it was given, also what others had listed before
    with safe_globals([one for one in allowed if one not in known]):
        try:
            return torch_load(file, **{**options, "weights_only": True})
        except (pickle.UnpicklingError, RuntimeError) as error:
            if hasattr(file, "seek"):
                file.seek(0)
            check(file, what, error)
            raise


def check(file: Any, what: str, cause: BaseException | None = None) -> None:
    """Raise `UntrustedFile` if a file of `torch.save` (path or stream) names other classes than
    those in `torch.serialization.safe_globals`. Nothing in the file runs.
    """
    check_sizes(file, what)
    listed = {*of_torch._get_allowed_globals(), *of_torch._get_user_allowed_globals()}
    with _opened(file) as stream:
        if unsafe := {name for pickled in _pickles(stream) for name in _names(pickled)} - listed:
            raise UntrustedFile(what, unsafe) from cause


def check_sizes(file: Any, what: str) -> None:
    """Raise `ValueError` if a zip file of `torch.save` is compressed, or if its members are larger
    than the file: reading it could fill the memory. torch writes no such file.
    """
    with _opened(file) as stream, contextlib.suppress(zipfile.BadZipFile):
        members = zipfile.ZipFile(stream).infolist()
        needed, size = sum(one.file_size for one in members), stream.seek(0, io.SEEK_END)
        if needed > size or any(one.compress_type != zipfile.ZIP_STORED for one in members):
            raise ValueError(
                f"{what} holds {needed} bytes in {size}, compressed or shared among its members: "
                "torch.save writes no such file, and it could fill the memory, so it is refused; "
                "write it again with torch.save")


@contextlib.contextmanager
def _opened(file: Any) -> Iterator[Any]:
    """A path's or a stream's bytes, from where the stream is; the stream stays there."""
    if isinstance(file, str | os.PathLike):
        with open(file, "rb") as stream:
            yield stream
        return
    start = file.tell()
    try:
        yield _FromStart(file)
    finally:
        file.seek(start)


class _FromStart(io.RawIOBase):
    """A stream that seeks from its start only: torch's views of a part of a file take an offset
    from their end with the wrong sign.
    """

    def __init__(self, file: Any) -> None:
        self.read, self.tell, self._file = file.read, file.tell, file

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.IOBase.seek`."""
        if whence == io.SEEK_END:
            self._file.seek(0, whence)
        self._file.seek(offset + (self.tell() if whence else 0))
        return self.tell()


def _pickles(stream: Any) -> Iterator[Any]:
    """The pickles in a file of `torch.save`."""
    start = stream.tell()
    with contextlib.suppress(zipfile.BadZipFile):
        archive = zipfile.ZipFile(stream)
        for name in archive.namelist():
            if name.endswith("/data.pkl"):
                with archive.open(name) as pickled:
                    yield io.BytesIO(pickled.read())
        return
    stream.seek(start)
    for _ in range(_LEGACY):
        yield stream


def _names(stream: Any) -> set[str]:
    """The classes and functions that the next pickle of a stream names."""
    found, texts = set[str](), ["", ""]
    with contextlib.suppress(ValueError, EOFError):  # the names up to where it is damaged
        for operation, value, _ in pickletools.genops(stream):
            if operation.name in ("GLOBAL", "INST"):
                found.add(".".join(str(value).split(" ", 1)))
            elif operation.name == "STACK_GLOBAL":
                found.add(".".join(texts))
            elif isinstance(value, str):
                texts = [texts[1], value]
    return found


class Unpickler(pickle.Unpickler):
    """Reads a pickle that may name only listed classes, and members of those that are enums.

    Args:
        stream: the pickle.
        allowed: `module.name` of each class.
        what: what errors call it.
    Raises:
        UntrustedFile: by `load`, it names another one.
    """

    def __init__(self, stream: Any, allowed: Iterable[str], what: str) -> None:
        super().__init__(stream)
        self._allowed, self._what = frozenset(allowed), what

    def find_class(self, module: str, name: str) -> Any:
        """The class, where it is listed; torch's data types are."""
        if f"{module}.{name}" in self._allowed:
            return super().find_class(module, name)
        if module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype):
            return torch.__dict__[name]
        if (module, name) == ("builtins", "getattr"):
            return self._member
        raise UntrustedFile(self._what, [f"{module}.{name}"])

    def _member(self, kind: Any, name: Any) -> Any:
        # Python 3.11.0 to 3.11.3 write a member as getattr(enum, its name), others as enum(value)
        if isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__:
            return kind[name]
        raise UntrustedFile(self._what, ["builtins.getattr"])
