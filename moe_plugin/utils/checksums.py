"""Compute and check CRC-32 checksums of checkpoint files. CRC-32 detects every change that affects
up to 32 adjacent bits.

A *sealed* file contains its own checksum. The checksum therefore stays with the file when the file
is moved or copied. Files written by torch contain the checksum in a trailer of 27 bytes. The
trailer is ignored by torch and zip tools. Safetensors files contain the checksum in the metadata of
the header, and JSON files contain it in the last entry. Files written by older versions of this
package are not sealed, but can still be loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from moe_plugin.utils.regular_files import check_input

try:
    from isal.isal_zlib import crc32  # the same checksums, several times as fast
except ImportError:
    from zlib import crc32

CHUNK = 1 << 20
_TRAILER, _TRAILER_BYTES = re.compile(rb"\nmoe-plugin crc32 ([0-9a-f]{8})\n"), 27
METADATA = {"moe_plugin_crc32": "0" * 8}  # header placeholder until the file is sealed
_DIGITS = re.compile(rb'"moe_plugin_crc32": ?"([0-9a-f]{8})"')
_HEADER_BYTES = 100 << 20  # limit of the safetensors library
_ZIP_START, _ZIP_END, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
_JSON_START = '{"sealed": true'
_JSON_END = re.compile(r', "crc32": "([0-9a-f]{8})"\}\s*')


class DamagedFile(ValueError):
    """Raised if a file does not contain the data that was originally written. The message contains
    the reason, but not the name of the file.
    """


class _SummingStream:
    """A stream that passes all bytes to a target stream and computes their checksum.

    The stream also stores the error of a failed write, because torch's writer raises a different
    error instead.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.crc, self._stream = 0, stream
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._stream.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.crc = crc32(data, self.crc)
        return written

    def flush(self) -> None:
        self._stream.flush()


def write_sealed(path: str | os.PathLike[str], write: Callable[[Any], None]) -> None:
    """Write a sealed binary file and flush it to disk. The checksum is computed while the file is
    being written.

    Args:
        write: function that receives a stream and writes the data to it.
    Raises:
        OSError: If the file cannot be written, for example because the disk is full.
    """
    with open(path, "wb") as stream:
        summing = _SummingStream(stream)
        try:
            write(summing)
        except Exception:
            if summing.error is not None:
                raise summing.error from None
            raise
        stream.write(trailer(summing.crc))
        stream.flush()
        os.fsync(stream.fileno())


def trailer(crc: int) -> bytes:
    """Return the trailer of a sealed file. `crc` is the checksum of the data before the trailer."""
    return b"\nmoe-plugin crc32 %08x\n" % crc


def _digits_in_header(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return the position and the value of the checksum in the header of a safetensors file, or
    None if the header does not contain a checksum.
    """
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= _HEADER_BYTES else b""
    match = _DIGITS.search(header) if header.startswith(b"{") else None
    return None if match is None else (8 + match.start(1), int(match[1], 16))


def seal(path: str | os.PathLike[str], crc: int | None = None) -> None:
    """Add the checksum to a file whose data is complete.

    If the file is a safetensors file that was created with `METADATA`, the checksum is written to
    the file's header. For all other files, the checksum is appended as a trailer.

    Args:
        path: path of the file.
        crc: optional. Checksum of the file's bytes, if already known. Computed by default.
    """
    crc, position = crc_of(path) if crc is None else crc, _digits_in_header(path)
    with open(path, "r+b") as stream:
        if position is None:
            stream.seek(0, os.SEEK_END)
            stream.write(trailer(crc))
        else:
            stream.seek(position[0])
            stream.write(b"%08x" % crc)


def seal_of(path: str | os.PathLike[str]) -> int | None:
    """Return the checksum that a sealed binary file contains, or None if the file is not sealed."""
    with open(path, "rb") as stream:
        stream.seek(max(0, os.path.getsize(path) - _TRAILER_BYTES))
        match = _TRAILER.fullmatch(stream.read())
    if match is not None:
        return int(match[1], 16)
    inside = _digits_in_header(path)
    return None if inside is None else inside[1]


def crc_of(path: str | os.PathLike[str], size: int | None = None, digits: int | None = None) -> int:
    """Return the CRC-32 checksum of a file.

    Args:
        path: path of the file.
        size: optional. Number of bytes to include, from the start of the file. Defaults to the
            whole file.
        digits: optional. Position of a checksum within the file, whose digits are counted as zeros.
    """
    size = os.path.getsize(path) if size is None else size
    with open(path, "rb", buffering=0) as stream:
        if digits is None:
            return _sum(stream, size, 0)
        crc = crc32(b"0" * 8, _sum(stream, digits, 0))
        stream.seek(digits + 8)
        return _sum(stream, size - digits - 8, crc)


def _sum(stream: RawIOBase, left: int, crc: int) -> int:
    """Update the checksum `crc` with the next `left` bytes of a stream."""
    buffer = memoryview(bytearray(min(CHUNK, max(left, 1))))  # fits in the processor's cache
    while left > 0 and (count := stream.readinto(buffer[:left])):
        crc, left = crc32(buffer[:count], crc), left - count
    return crc


def verify(path: str | os.PathLike[str]) -> bool:
    """Compare a file with the checksum that it contains. Returns whether the file is sealed.

    Raises:
        DamagedFile: If the file is sealed, but its data does not match the checksum.
    """
    check_input(path)
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        start = stream.read(len(_ZIP_START))
        stream.seek(max(0, size - _TRAILER_BYTES))
        end = stream.read()
    trailer, inside = _TRAILER.fullmatch(end), _digits_in_header(path)
    if trailer is None and inside is None:
        # An unsealed zip file ends with its directory. Any other end is a damaged trailer.
        if start == _ZIP_START and end[-_ZIP_END_BYTES:][: len(_ZIP_END)] != _ZIP_END:
            raise DamagedFile("its last bytes differ from those that were written")
        return False
    if trailer is None:
        assert inside is not None
        at, wanted = inside
        actual = crc_of(path, size, at)
    else:
        actual, wanted = crc_of(path, size - _TRAILER_BYTES), int(trailer[1], 16)
    if actual != wanted:
        raise DamagedFile(f"its checksum is {actual:08x}, but it was written with {wanted:08x}")
    return True


def seal_json(values: Mapping[str, Any]) -> str:
    """Convert a mapping to a JSON string that contains a checksum."""
    body = json.dumps({"sealed": True, **values})[:-1]
    return f'{body}, "crc32": "{crc32(body.encode()):08x}"}}\n'


def open_json(text: str) -> tuple[Any, bool]:
    """Parse a JSON string, and return the values and whether the string is sealed.

    Raises:
        DamagedFile: If the string is sealed, but does not match its checksum.
        ValueError: If the string is not JSON.
    """
    start, end = text.startswith(_JSON_START), None
    if match := re.search(_JSON_END.pattern + r"\Z", text[-64:]):
        end = len(text) - len(text[-64:]) + match.start()
    if start or end is not None:
        if not start or match is None or crc32(text[:end].encode()) != int(match[1], 16):
            raise DamagedFile("its checksum differs from the checksum with which it was written")
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("too many nested brackets") from error
    if start:
        del values["sealed"], values["crc32"]
    return values, start


_CHECKED: list[Path] = []  # files that another function has verified


@contextmanager
def verified(paths: Iterable[Path]) -> Iterator[None]:
    """Inside the block, treat the given files as verified, so that `FirstRead` does not verify them
    again.
    """
    own_paths = list(paths)
    _CHECKED.extend(own_paths)
    try:
        yield
    finally:
        for path in own_paths:
            _CHECKED.remove(path)


class FirstRead:
    """Verifies a file before its first tensor is read.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._done, self._lock = path, False, Lock()

    def __call__(self) -> None:
        """Verify the file if it has not been verified yet.

        Raises:
            DamagedFile: If the file is sealed, but its data does not match the checksum.
        """
        if self._done or self._path in _CHECKED:
            return
        with self._lock:
            if not self._done:
                verify(self._path)
                self._done = True
