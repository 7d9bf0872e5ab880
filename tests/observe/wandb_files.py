"""Reads what Weights & Biases wrote offline: records of their protocol in LevelDB's log format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # of LevelDB's log; the file begins with as many bytes of its own
FULL, LAST = 1, 4


def rows(folder: Path) -> list[dict[str, float]]:
    """The numbers that the only run in a folder logged, by name, row after row."""
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json)
             for item in record.history.item} for record in _records(folder, "history")]


def alerts(folder: Path) -> list[tuple[str, str]]:
    """(title, text) of its alerts."""
    return [(record.alert.title, record.alert.text) for record in _records(folder, "alert")]


def _records(folder: Path, field: str) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for message in _messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        if record.HasField(field):
            yield record


def _messages(data: bytes) -> Iterator[bytes]:
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # no space for a header: zeros
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER:at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""
