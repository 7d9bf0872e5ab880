"""Where records are written: a JSONL file, TensorBoard."""

from __future__ import annotations

import json
import os
from typing import Any, Protocol


class Sink(Protocol):
    """Takes records: `step`, `time` (seconds since the epoch), `layer`, and the fields of
    `StatsRecorder`.
    """

    def write(self, record: dict[str, Any]) -> None:
        """Take one record."""

    def close(self) -> None:
        """No more records."""


class JsonlSink:
    """Appends one JSON object a line. Every record is on disk when `write` returns, so a killed run
    loses none.
    """

    def __init__(self, path: str) -> None:
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            self._stream = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open until `close`
        except OSError as error:
            raise ValueError(
                f"observe.jsonl={path!r} cannot be written ({error.strerror}); give the path of a "
                "file"
            ) from error

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoardSink:
    """Scalars `moe/<layer>/<field>` and `moe/<layer>/loss/<name>`, and each expert's share of the
    load.
    """

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
            raise ValueError(
                f"observe.tensorboard={directory!r} cannot be written ({error.strerror}); give a "
                "directory"
            ) from error

    def write(self, record: dict[str, Any]) -> None:
        """One point for each number of the record."""
        step, where = record["step"], f"moe/{record['layer']}"
        for key, value in record.items():
            if key not in ("step", "time", "layer", "load", "losses", "layouts", "decisions",
                           "exchanges", "routers") and value is not None:
                self._writer.add_scalar(f"{where}/{key}", value, step, record["time"])
        for name, value in record["losses"].items():
            self._writer.add_scalar(f"{where}/loss/{name}", value, step, record["time"])
        total = sum(record["load"]) or 1
        for expert, count in enumerate(record["load"]):
            self._writer.add_scalar(f"{where}/share/expert{expert:03d}", count / total, step,
                                    record["time"])

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()
