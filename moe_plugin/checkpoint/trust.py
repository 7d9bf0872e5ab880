"""Load files from untrusted sources.

Only plain values and allowed classes are unpickled, so code in the files is never executed.
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
torch_load = torch.load  # a copy, because a host may restrict `torch.load` itself
_LEGACY = 4  # number of pickles ahead of the tensors in a `torch.save` file that is not a zip file


class UntrustedFile(ValueError):
    """Raised if a file contains classes that are not allowed. Unpickling such classes could run
    code that is stored in the file.
    """

    def __init__(self, what: str, classes: Iterable[str]) -> None:
        super().__init__(
            f"{what} contains {short(', '.join(sorted(classes)))}: loading it can run code from "
            f"the file, so it is refused; if you trust the author of the file, use {FLAG}")


def load(file: Any, allowed: Iterable[Any], what: str, **options: Any) -> Any:
    """Call `torch.load`, but accept only plain values, tensors and the classes in `allowed`.

    Args:
        file: path of the file, or an open stream.
        allowed: classes and functions to which the pickle may refer.
        what: description of the file for error messages.
        options: additional keyword arguments of `torch.load`.
    Raises:
        UntrustedFile: If the pickle refers to classes that are not in `allowed`. RuntimeError,
            pickle.UnpicklingError: If the file is damaged and `torch.load` cannot read it.
        ValueError: If loading the file would need more memory than the size of the file.
    """
    check_sizes(file, what)
    known = {*get_safe_globals()}
    # On exit `safe_globals` forgets all classes passed to it, even classes that were registered
    # before it was entered. So only new classes are passed.
    with safe_globals([allowed_class for allowed_class in allowed if allowed_class not in known]):
        try:
            return torch_load(file, **{**options, "weights_only": True})
        except (pickle.UnpicklingError, RuntimeError) as error:
            if hasattr(file, "seek"):
                file.seek(0)
            check(file, what, error)
            raise


def check(file: Any, what: str, cause: BaseException | None = None) -> None:
    """Raise `UntrustedFile` if a `torch.save` file refers to classes that are not allowed.

    The allowed classes are those in `torch.serialization.safe_globals`. No code in the file is
    executed.

    Args:
        file: path of the file, or an open stream.
        what: description of the file for error messages.
        cause: original error, which becomes the cause of the `UntrustedFile` error. Optional.
    """
    check_sizes(file, what)
    listed = {*of_torch._get_allowed_globals(), *of_torch._get_user_allowed_globals()}
    with _opened(file) as stream:
        if unsafe := {name for pickled in _pickles(stream)
                      for name in _referenced_classes(pickled)} - listed:
            raise UntrustedFile(what, unsafe) from cause


def check_sizes(file: Any, what: str) -> None:
    """Raise `ValueError` if a zip file in the format of `torch.save` is compressed, or if its
    members are together larger than the file.

    Reading such a file could exhaust the memory. `torch.save` never writes such files.
    """
    with _opened(file) as stream, contextlib.suppress(zipfile.BadZipFile):
        members = zipfile.ZipFile(stream).infolist()
        needed, size = sum(member.file_size for member in members), stream.seek(0, io.SEEK_END)
        if needed > size or any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError(
                f"{what} is {size} bytes large but expands to {needed} bytes; its members are "
                "compressed or share data. torch.save does not write such files, and loading it "
                "could "
                "exhaust the memory, so it is refused; write the file again with torch.save")


@contextlib.contextmanager
def _opened(file: Any) -> Iterator[Any]:
    """Yield a stream of the bytes of a file. If `file` is a stream, reading starts at its current
    position. This position is restored at the end.
    """
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
    """A stream that converts every seek to a seek from the start of the stream.

    This is a workaround for a bug in torch: its views of a range of a file use the wrong sign for
    offsets from the end.
    """

    def __init__(self, file: Any) -> None:
        self.read, self.tell = file.read, file.tell  # type: ignore[method-assign]
        self._file = file

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.IOBase.seek`."""
        if whence == io.SEEK_END:
            self._file.seek(0, whence)
        self._file.seek(offset + (self.tell() if whence else 0))
        return self.tell()


def _pickles(stream: Any) -> Iterator[Any]:
    """Yield every pickle in a `torch.save` file."""
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


def _referenced_classes(stream: Any) -> set[str]:
    """Return the classes and functions to which the next pickle in a stream refers."""
    classes, texts = set[str](), ["", ""]
    # a damaged pickle yields the names ahead of the damage
    with contextlib.suppress(ValueError, EOFError):
        for operation, value, _ in pickletools.genops(stream):
            if operation.name in ("GLOBAL", "INST"):
                classes.add(".".join(str(value).split(" ", 1)))
            elif operation.name == "STACK_GLOBAL":
                classes.add(".".join(texts))
            elif isinstance(value, str):
                texts = [texts[1], value]
    return classes


class Unpickler(pickle.Unpickler):
    """An unpickler that accepts only allowed classes, and members of allowed enums.

    Args:
        stream: the pickle.
        allowed: names of the allowed classes, in the form `module.name`.
        what: description of the file for error messages.
    Raises:
        UntrustedFile: If the pickle refers to a class that is not allowed. This error is raised by
            the method `load`.
    """

    def __init__(self, stream: Any, allowed: Iterable[str], what: str) -> None:
        super().__init__(stream)
        self._allowed, self._what = frozenset(allowed), what

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or a data type of torch, or raise `UntrustedFile`."""
        if f"{module}.{name}" in self._allowed:
            return super().find_class(module, name)
        if module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype):
            return torch.__dict__[name]
        if (module, name) == ("builtins", "getattr"):
            return self._member
        raise UntrustedFile(self._what, [f"{module}.{name}"])

    def _member(self, kind: Any, name: Any) -> Any:
        # Python 3.11.0 to 3.11.3 pickle a member as getattr(enum, its name), other versions as
        # enum(value)
        if isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__:
            return kind[name]
        raise UntrustedFile(self._what, ["builtins.getattr"])
