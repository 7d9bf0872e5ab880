"""Sums of whole files from those of pieces that were read."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin import checksums
from moe_plugin.checksums import ReadSums, combined, summed, sums_of
from moe_plugin.regular_files import begin_writing

pytestmark = pytest.mark.fast


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_pieces(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(
        first + second)


@given(st.binary(min_size=1, max_size=200), st.lists(
    st.tuples(st.integers(0, 220), st.integers(0, 60)), max_size=12), st.integers(0, 200))
def test_any_pieces_in_any_order(tmp_path_factory: pytest.TempPathFactory, content: bytes,
                                 pieces: list[tuple[int, int]], size: int) -> None:
    path = tmp_path_factory.mktemp("sums") / "file"
    path.write_bytes(content)
    sums, size = ReadSums(), min(size, len(content))
    for start, length in pieces:
        if data := content[start:start + length]:
            sums.add(start, memoryview(data))
    assert sums.crc_of(path, size) == zlib.crc32(content[:size])


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(0).randbytes(5000)
    path, read = tmp_path / "file", []
    path.write_bytes(content)
    sums = ReadSums()
    for start, stop in ((3000, 4500), (100, 2000), (1500, 2600), (100, 900)):
        sums.add(start, memoryview(content)[start:stop])
    whole = checksums.read_on
    monkeypatch.setattr(checksums, "read_on", lambda file, at, until, crc: (
        read.append((at, until)), whole(file, at, until, crc))[1])
    assert sums.crc_of(path, 5000) == zlib.crc32(content)
    assert read == [(0, 100), (2000, 3000), (4500, 5000)]


def test_of_two_threads_that_read_from_one_byte_the_longer_piece_counts(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, sums, path = random.Random(0).randbytes(100), ReadSums(), tmp_path / "file"
    path.write_bytes(content)

    def summed_meanwhile(data: memoryview, crc: int = 0) -> int:
        if len(data) == 10:
            sums.add(0, memoryview(content))  # by the other thread, while this one sums
        return zlib.crc32(data, crc)

    monkeypatch.setattr(checksums, "crc32", summed_meanwhile)
    sums.add(0, memoryview(content)[:10])
    path.write_bytes(bytes(100))  # what was summed is not read
    assert sums.crc_of(path, 100) == zlib.crc32(content)


def test_many_threads_add_pieces(tmp_path: Path) -> None:
    content, sums, path = random.Random(1).randbytes(1 << 20), ReadSums(), tmp_path / "file"
    path.write_bytes(content)

    def read(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(200):
            start = draw.randrange(0, 1 << 20, 1 << 14)
            sums.add(start, memoryview(content)[start:start + draw.randrange(1, 1 << 16)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert sums.crc_of(path, len(content)) == zlib.crc32(content)


def test_a_sum_is_of_what_was_read(tmp_path: Path) -> None:
    """Not of what the file holds at the end."""
    path = tmp_path / "file"
    path.write_bytes(b"right values")
    sums = ReadSums()
    sums.add(0, memoryview(b"wrong"))
    assert sums.crc_of(path, 12) == zlib.crc32(b"wrong values")


def test_files_are_summed_while_somebody_wants_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with summed([path]) as outer:
        assert sums_of(path) is outer[path] and sums_of(tmp_path) is None
        with summed([path]) as inner:
            assert sums_of(path) is inner[path]
        assert sums_of(path) is None  # the outer one reads the rest itself
    assert sums_of(path) is None


def test_writing_can_begin_before_the_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb", buffering=0) as file:
        file.write(b"x" * 10_000)
        begin_writing(file.fileno(), 0, 8192)
        file.write(b"y")
    assert path.read_bytes() == b"x" * 10_000 + b"y"
