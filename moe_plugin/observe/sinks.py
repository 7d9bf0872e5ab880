"""Where records are written: a JSONL file, TensorBoard."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

from moe_plugin.messages import short
from moe_plugin.regular_files import open_append, write_remedy

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes records: `step`, `time` (seconds since the epoch), `layer`, the fields of a record."""

    def write(self, record: dict[str, Any]) -> None:
        """Write one record."""

    def close(self) -> None:
        """Close the files."""


class JsonlSink:
    """Appends one JSON object per line.

    Every record is in the file when `write` returns, so a killed run loses none. A record that
    cannot be written, e.g. because the disk is full, is lost with a warning: training goes on.

    Args:
        path: the file; its folder is made.
        name: the setting or flag that names it, for messages.
    Raises:
        ValueError: it cannot be opened.
    """

    def __init__(self, path: str, name: str = "observe.jsonl") -> None:
        try:
            self._stream = open_append(path)
        except ValueError as error:
            raise ValueError(f"{name}={short(path)}: {error}") from error
        self._where, self._folder = f"{name}={short(path)}", os.path.dirname(os.path.abspath(path))
        self._cut = _ends_within_a_line(path)
        self._lost = 0

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        try:
            self._append((json.dumps(record) + "\n").encode())
        except OSError as error:
            if not self._lost:
                logger.warning("%s cannot be written (%s), its records are lost until it can; %s",
                               self._where, error.strerror, write_remedy(error, self._folder))
            self._lost += 1
            return
        if self._lost:
            logger.warning("%s is written again; %d records were lost", self._where, self._lost)
            self._lost = 0

    def _append(self, line: bytes) -> None:
        rest = memoryview(b"\n" + line if self._cut else line)
        while rest:
            rest = rest[self._stream.write(rest):]
            self._cut = len(rest) > 0

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _ends_within_a_line(path: str) -> bool:
    """Whether the last line of a file has no end: a run was killed while it wrote."""
    with open(path, "rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return False
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


class TensorBoardSink:
    """Writes scalars `moe/<layer>/<field>`, `.../loss/<name>` and `.../share/expert<number>`.

    Where the files cannot be written, it warns once and writes no more: training goes on.

    Raises:
        ValueError: TensorBoard is not installed, or the directory cannot be made.
    """

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"observe.tensorboard={short(directory)} needs TensorBoard, which is not "
                "installed; pip install 'moe-plugin[observe]', or set it to none") from error
        try:
            self._writer = SummaryWriter(directory)
        except OSError as error:
            raise ValueError(f"observe.tensorboard={short(directory)} cannot be written "
                             f"({error.strerror}); give a directory") from error
        self._directory, self._failed = directory, False

    def write(self, record: dict[str, Any]) -> None:
        """Write one point for each number of the record."""
        if not self._failed:
            self._unless_it_fails(lambda: self._points(record))

    def _points(self, record: dict[str, Any]) -> None:
        total = sum(record["load"]) or 1
        numbers = {
            **{key: value for key, value in record.items()
               if isinstance(value, (int, float)) and key not in ("step", "time")},
            **{f"loss/{name}": value for name, value in record["losses"].items()},
            **{f"share/expert{i:03d}": n / total for i, n in enumerate(record["load"])},
        }
        for key, value in numbers.items():
            self._writer.add_scalar(f"moe/{record['layer']}/{key}", value, record["step"],
                                    record["time"])

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._unless_it_fails(self._writer.close)

    def _unless_it_fails(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:  # also of TensorBoard's own thread, raised by the next call
            if not self._failed:
                logger.warning("observe.tensorboard=%r cannot be written (%s), nothing more is "
                               "written there; %s", self._directory, error.strerror,
                               write_remedy(error, self._directory))
            self._failed = True
