"""Functions that read, write and append to regular files, and refuse devices, pipes and folders.

Symbolic links are not replaced. Error messages contain the path of the file and a remedy.
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
    """Return the type of a path, such as "folder" or "pipe", or an empty string for a regular or
    missing file.
    """
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except (OSError, ValueError):
        return ""  # opening the file reports the reason
    return next((name for test, name in _KINDS if test(mode)), "")


def check_input(path: _Path, what: str = "", remedy: str = "give a file") -> None:
    """Raise a `ValueError` if `path` is not a regular file. Opening a pipe, for example, could
    block forever.

    Args:
        path: path of the file. If the file is missing, no error is raised until the file is opened.
        what: description of the file, for the error message.
        remedy: what the user can do, for the error message.
    """
    kind = _kind(path, follow=True)
    if kind:
        name = f"{what} {short(os.fspath(path))}".strip()
        raise ValueError(f"{name} is a {kind}, not a regular file; {remedy}")


def check_output(path: _Path) -> Path:
    """Return the path if `write_regular` can write to it, and raise a `ValueError` otherwise.

    Commands that run for a long time should call this function before they start.
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
    """Return the temporary path to which a file is written before it is renamed to its final path.
    """
    return path.with_name(path.name + ".new")


def read_at(file: int, values: memoryview, offset: int) -> int:
    """Fill a buffer with bytes of an open file, starting at position `offset`.

    Returns: The number of bytes that are missing because the file is too short, or 0.
    Raises:
        OSError: If the file cannot be read.
    """
    while values:
        count = os.preadv(file, [values], offset)
        if not count:
            break
        values, offset = values[count:], offset + count
    return len(values)


def begin_writing(file: int, offset: int, nbytes: int) -> None:
    """Start to flush a range of an open file to disk, without removing the range from the page
    cache.

    This function calls sync_file_range(2) of Linux, which Python does not provide. Nothing happens
    if the C library does not provide it either.
    """
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(file, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _WRITE)


def write_regular(path: _Path, content: str | bytes) -> Path:
    """Write a file atomically. Strings are encoded as UTF-8.

    Raises:
        ValueError: If the path is not a regular file, or if the file cannot be written.
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
    """Write a small file and flush it to disk. The file is renamed to its final name when it is
    complete.

    Args:
        path: path of the file.
        content: string to write, or a function that receives a stream and writes the data to it.
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
    """Rename a complete folder to its final name.

    If the process is killed, either the old or the new folder is still complete, but the old folder
    may have the name `NAME.old`.

    Args:
        scratch: path of the complete new folder.
        target: final path of the new folder.
        keep_old: whether to keep the old folder under the name `NAME.old`.
    """
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(scratch, target)
    if not keep_old:
        shutil.rmtree(old, ignore_errors=True)


def make_folder(path: _Path) -> Path:
    """Create a folder, including its parents, if it does not exist, and return its path. Raises a
    `ValueError` if the folder cannot be created.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse_output(path, error)
    return path


def output_folder(path: _Path, names: Iterable[str]) -> Path:
    """Create a folder if it does not exist, and check that files with the given names can be
    written to it.

    Commands that run for a long time should call this function before they start.

    Raises:
        ValueError: If the folder or one of the files is not writable.
    """
    folder = make_folder(path)
    for name in names:
        check_output(folder / name)
    return folder


def open_append(path: _Path) -> BinaryIO:
    """Open a file for appending bytes, without buffering. The folder of the file is created if it
    does not exist. Symbolic links are followed.

    Raises:
        ValueError: If the path is not a regular file, or if the file cannot be written.
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
    """Raise a `ValueError` that contains the path of a file that cannot be written, the reason and
    a remedy.
    """
    raise ValueError(f"{path} cannot be written ({error.strerror}); "
                     f"{write_remedy(error, path.parent)}") from error


def is_full(error: OSError) -> bool:
    """Return whether an error means that the disk or the user's disk quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def system_error(error: BaseException | None) -> OSError | None:
    """Return the `OSError` that caused an error, or None if there is none.

    This search is necessary because `torch.save` raises a different error if a stream cannot be
    written.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def write_remedy(error: BaseException, folder: _Path) -> str:
    """Return a remedy for an error that occurred while writing a file to `folder`."""
    os_error = system_error(error)
    code = None if os_error is None else os_error.errno
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    # torch's file writer hides the reason why a stream could not be written
    if is_full(os_error) if os_error is not None else free < _ALMOST_NOTHING:
        return (f"the disk is full ({free / 2**20:.0f} MiB free): free space or choose another "
                "folder")
    if code in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "the folder is read-only here: make it writable or choose another folder"
    if code in (errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, errno.EISDIR):
        return "choose another folder, or give another path"
    return "free space or choose another folder"
