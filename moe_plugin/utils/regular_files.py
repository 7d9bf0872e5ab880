"""Reading, writing and appending to regular files only: never a device, a pipe or a folder, and no
link is replaced. Errors name the file and the remedy.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from moe_plugin.utils.messages import short

_KINDS = ((stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"), (stat.S_ISFIFO, "pipe"),
          (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device"), (stat.S_ISSOCK, "socket"))
_ALMOST_NOTHING = 2**20  # bytes
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_Path = str | os.PathLike[str]


def _kind(path: _Path, follow: bool) -> str:
    """What is there other than a regular file; empty: one, or nothing."""
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except (OSError, ValueError):
        return ""  # opening it says why
    return next((name for test, name in _KINDS if test(mode)), "")


def check_input(path: _Path, what: str = "", remedy: str = "give a file") -> None:
    """`ValueError` where `path` is not a file that ends: opening a pipe would hang.

    Args:
        path: may be missing: opening it says so.
        what: what errors call the file.
        remedy: what they recommend.
    """
    kind = _kind(path, follow=True)
    if kind:
        name = f"{what} {short(os.fspath(path))}".strip()
        raise ValueError(f"{name} is a {kind}, not a regular file; {remedy}")


def check_output(path: _Path) -> Path:
    """The path; `ValueError` where `write_regular` could not write there. For commands that measure
    long before they write.
    """
    path = Path(path)
    for name in (path, half_of(path)) if path.name else (path,):
        kind = _kind(name, follow=False)
        if kind:
            raise ValueError(f"{name} cannot be written (it is a {kind}, which is not replaced); "
                             "give the path of a regular file")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written (there is no folder {path.parent}); give the "
                         "path of a file in a folder that exists")
    return path


def half_of(path: Path) -> Path:
    """The name under which a file is written before it is complete."""
    return path.with_name(path.name + ".new")


def read_at(file: int, values: memoryview, offset: int) -> int:
    """Fill a buffer from an open file, from a byte on; how many bytes the file is too short.

    Raises:
        OSError: it cannot be read.
    """
    while values:
        count = os.preadv(file, [values], offset)
        if not count:
            break
        values, offset = values[count:], offset + count
    return len(values)


def begin_writing(file: int, offset: int, nbytes: int) -> None:
    """Let the disk begin to take a part of an open file, which stays in memory. Linux's
    sync_file_range(2), which Python does not have; nothing where the C library has none.
    """
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(file, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _WRITE)


def write_regular(path: _Path, content: str | bytes) -> Path:
    """Write a file whole or not at all. Text is written as UTF-8.

    Raises:
        ValueError: something else than a regular file is there, or it cannot be written.
    """
    path = check_output(path)
    half = half_of(path)
    try:
        half.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(half, path)
    except OSError as error:
        half.unlink(missing_ok=True)
        refuse_output(path, error)
    return path


def write_whole(path: Path, content: str | Callable[[BinaryIO], Any]) -> None:
    """Write a small file, flushed to disk; it gets its name when it is complete.

    content: text, or what writes to the stream that it is given.
    """
    half = half_of(path)
    with open(half, "wb") as stream:
        if isinstance(content, str):
            stream.write(content.encode())
        else:
            content(stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(half, path)


def move_into_place(scratch: Path, target: Path, keep_old: bool = False) -> None:
    """Give a complete folder its name; a killed process leaves the old folder or the new one
    complete, the old one perhaps as `NAME.old`.

    keep_old: leave it there in any case.
    """
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(scratch, target)
    if not keep_old:
        shutil.rmtree(old, ignore_errors=True)


def make_folder(path: _Path) -> Path:
    """A folder, made with those above it where it is missing; `ValueError` where it cannot be."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse_output(path, error)
    return path


def output_folder(path: _Path, names: Iterable[str]) -> Path:
    """A folder, made where it is missing, in which files of these names can be written; for
    commands that measure long before they write. Raises: ValueError: they cannot be.
    """
    folder = make_folder(path)
    for name in names:
        check_output(folder / name)
    return folder


def open_append(path: _Path) -> BinaryIO:
    """A file to which bytes are appended, unbuffered; its folder is made. A link is followed.

    Raises:
        ValueError: something else than a regular file is there, or it cannot be written.
    """
    path = Path(path)
    kind = _kind(path, follow=True)
    if kind:
        raise ValueError(f"{path} cannot be written (it is a {kind}); give the path of a regular "
                         "file")
    make_folder(path.parent)
    try:
        return open(path, "ab", buffering=0)
    except OSError as error:
        refuse_output(path, error)


def refuse_output(path: Path, error: OSError) -> NoReturn:
    """Raise a `ValueError` that names a file which cannot be written, the cause and the remedy."""
    raise ValueError(f"{path} cannot be written ({error.strerror}); "
                     f"{write_remedy(error, path.parent)}") from error


def is_full(error: OSError) -> bool:
    """Whether a disk, or a user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def system_error(error: BaseException | None) -> OSError | None:
    """The error of the operating system behind an error, if there is one: `torch.save` raises
    others when a stream cannot be written.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def write_remedy(error: BaseException, folder: _Path) -> str:
    """What to do where a file in `folder` could not be written."""
    found = system_error(error)
    code = None if found is None else found.errno
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    # torch's writer of files hides why a stream could not be written
    if is_full(found) if found is not None else free < _ALMOST_NOTHING:
        return (f"the disk is full ({free / 2**20:.0f} MiB free): free space or choose another "
                "folder")
    if code in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "the folder is read-only here: make it writable or choose another folder"
    if code in (errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, errno.EISDIR):
        return "choose another folder, or give another path"
    return "free space or choose another folder"
