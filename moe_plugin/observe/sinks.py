"""Where records are written: a JSONL file, TensorBoard."""

from __future__ import annotations

import json
import os
from typing import Any, Protocol


class Sink(Protocol):
    """Takes records: `step`, `time` (seconds since the epoch), `layer`, the fields of a record."""

    def write(self, record: dict[str, Any]) -> None:
        """Write one record."""

    def close(self) -> None:
        """Close the files."""


class JsonlSink:
    """Appends one JSON object per line.

    Every record is in the file when `write` returns, so a killed run loses none.
    """

    def __init__(self, path: str) -> None:
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            self._stream = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open until `close`
        except OSError as error:
            raise ValueError(f"observe.jsonl={path!r} cannot be written ({error.strerror}); give "
                             "the path of a file") from error

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoardSink:
    """Writes scalars `moe/<layer>/<field>`, `.../loss/<name>` and `.../share/expert<number>`."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"observe.tensorboard={directory!r} needs TensorBoard, which is not installed; "
                "pip install 'moe-plugin[observe]', or set it to none") from error
        try:
            self._writer = SummaryWriter(directory)
        except OSError as error:
            raise ValueError(f"observe.tensorboard={directory!r} cannot be written "
                             f"({error.strerror}); give a directory") from error

    def write(self, record: dict[str, Any]) -> None:
        """Write one point for each number of the record."""
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
        self._writer.close()
