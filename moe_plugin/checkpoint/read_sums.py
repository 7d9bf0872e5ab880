"""Checksums of what was read of files, from which those of the whole files are made: a conversion
verifies the bytes that it converts, and reads a file once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from threading import Lock

from moe_plugin.checkpoint.checksums import CHUNK, crc32
from moe_plugin.regular_files import read_at

_POLYNOMIAL, _ONE = 0xEDB88320, 1 << 31  # of CRC-32, and x^0; bits are reflected: x^31 is 1


def combined(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two pieces of data that follow each other, from those of both."""
    return _times(_after(second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


@functools.lru_cache(maxsize=256)  # most pieces are of a few lengths
def _after(nbytes: int) -> int:
    """x^(8 nbytes): what a sum is multiplied by where so many bytes follow."""
    power, square = _ONE, _ONE >> 8  # x^8
    while nbytes:
        if nbytes & 1:
            power = _times(square, power)
        square, nbytes = _times(square, square), nbytes >> 1
    return power


class ReadSums:
    """Sums of pieces of one file. Several threads may add to it."""

    def __init__(self) -> None:
        self._pieces: dict[int, tuple[int, int]] = {}  # first byte: (bytes, sum)
        self._lock = Lock()

    def add(self, start: int, data: memoryview) -> None:
        """Note a piece that was read; of those that begin at one byte the longest counts."""
        if data.nbytes > self._pieces.get(start, (0, 0))[0]:
            piece = data.nbytes, crc32(data)
            with self._lock:  # another thread may have added a longer one meanwhile
                self._pieces[start] = max(piece, self._pieces.get(start, (0, 0)), key=itemgetter(0))

    def crc_of(self, path: str | os.PathLike[str], size: int) -> int:
        """CRC-32 of the first `size` bytes of the file; what no piece has is read now.

        Raises:
            OSError: it cannot be read.
        """
        crc = at = 0
        with open(path, "rb", buffering=0) as file:
            for start, (nbytes, piece) in sorted(self._pieces.items()):
                if start >= at and start + nbytes <= size:  # of two that overlap the first
                    crc = combined(_read_on(file.fileno(), at, start, crc), piece, nbytes)
                    at = start + nbytes
            return _read_on(file.fileno(), at, size, crc)


def _read_on(file: int, at: int, until: int, crc: int) -> int:
    """The sum, after these bytes of a file were added to it."""
    buffer = memoryview(bytearray(min(CHUNK, max(until - at, 1))))
    while at < until:
        part = buffer[:until - at]
        part = part[:part.nbytes - read_at(file, part, at)]
        if not part:
            break  # it was cut short: the sum is another one
        crc, at = crc32(part, crc), at + part.nbytes
    return crc


_SUMMED: dict[Path, ReadSums] = {}


@contextmanager
def summed(paths: Iterable[Path]) -> Iterator[Mapping[Path, ReadSums]]:
    """Sum what is read of these files meanwhile."""
    mine = {path: ReadSums() for path in paths}
    _SUMMED.update(mine)
    try:
        yield mine
    finally:
        for path, sums in mine.items():
            if _SUMMED.get(path) is sums:
                del _SUMMED[path]


def sums_of(path: Path) -> ReadSums | None:
    """Where reads of a file are noted; None: nowhere."""
    return _SUMMED.get(path)
