"""Conversion of a checkpoint to another format or layout, and the summary of a checkpoint.

A conversion processes tensors in blocks, one block at a time. An interrupted conversion can be
resumed. The converted checkpoint is moved to its final path only when it is complete.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from moe_plugin.checkpoint.derived import cast
from moe_plugin.checkpoint.formats.base import (
    CheckpointSizes,
    WriteProgress,
    check_pair,
    convert,
    formats,
)
from moe_plugin.checkpoint.reshard import COLUMNS
from moe_plugin.checkpoint.source import (
    MODEL,
    MODEL_ONLY,
    WEIGHTS,
    CheckpointError,
    Derived,
    Source,
    View,
    refuse_damaged,
)
from moe_plugin.utils import checksums
from moe_plugin.utils.regular_files import move_into_place, write_remedy, write_whole

logger = logging.getLogger(__name__)
PLAN = "conversion.json"  # stored in the written folder


@dataclass
class Conversion:
    """A conversion of one checkpoint to another format or layout.

    Attributes:
        source: the open checkpoint to convert.
        target: folder of the converted checkpoint.
        to: name of the format of the converted checkpoint.
        layout: parallel sizes and data type of the converted checkpoint.
        model_only: whether to leave out the optimizer state.
        force: whether to replace an existing folder at `target` that this conversion did not write.
        advance: function that is called with the number of bytes that were just verified, reused or
            written. Several threads call this function.
        kept: names of the files that an interrupted conversion completed and this conversion
            reuses.
    """

    source: Source
    target: Path
    to: str
    layout: CheckpointSizes = CheckpointSizes()
    model_only: bool = False
    force: bool = False
    advance: Callable[[int], None] = lambda _: None
    kept: list[str] = field(default_factory=list)

    @property
    def scratch(self) -> Path:
        """Return the folder in which files are written until the conversion is complete."""
        return self.target.with_name(self.target.name + ".converting")

    def run(self) -> bool:
        """Convert the checkpoint.

        Returns: True if files were written, or False if the converted checkpoint already existed.

        Raises:
            CheckpointError: If a file of the source is damaged, the format cannot represent a
                value, the disk is full, or `target` contains a different folder.
            ValueError: If the format does not support the layout.
        """
        check_pair(self.source.format, self.to)
        formats.get(self.to)().check(replace(self.layout, dtype=None))
        plan = self._plan()
        if self._already_converted(plan):
            return False
        view = self._view()
        if unsealed := self.source.unsealed():
            logger.warning("%d of %d files of the %s checkpoint have no checksum (such as %s), so "
                           "damage in these files is not detected", len(unsealed),
                           len(self.source.files()), self.source.format, unsealed[0])
        try:
            for path in self.source.files():
                refuse_damaged([path])
                self.advance(path.stat().st_size)
            self._write(view, plan)
        except OSError as error:
            kept = (f"completed files remain in {str(self.scratch)!r} and are reused by the next "
                    "run; " if self.scratch.is_dir() else "")
            raise CheckpointError(
                f"checkpoint {str(self.target)!r} cannot be written ({error.strerror}); {kept}"
                f"{write_remedy(error, self.target.parent)}") from error
        return True

    def _plan(self) -> dict[str, Any]:
        """Return the values that identify a conversion: source files, format and layout."""
        files = {str(path.absolute()): [path.stat().st_size, path.stat().st_mtime_ns]
                 for path in self.source.files()}
        layout = {name: str(value) for name, value in asdict(self.layout).items()
                  if value is not None}
        return {"from": self.source.format, "to": self.to, "files": files, "layout": layout,
                "model_only": self.model_only}

    def _already_converted(self, plan: Mapping[str, Any]) -> bool:
        if not self.target.exists():
            return False
        if _read_plan(self.target).get("plan") == json.loads(json.dumps(plan)):
            return True
        if not self.force:
            raise CheckpointError(f"{str(self.target)!r} already exists and is not the result of "
                                  "this conversion; choose another folder, or use --force to "
                                  "replace it")
        return False

    def _view(self) -> Source:
        dtype = self.layout.dtype
        source = self.source if dtype is None else self.source.decoded(dtype)
        view = convert(without_optimizer(source) if self.model_only else source, self.to)
        if dtype is None:
            return view
        return View(view, (_cast_model(view.tensor(key), dtype) for key in view.entries))

    def _write(self, view: Source, plan: Mapping[str, Any]) -> None:
        scratch, progress = self.scratch, _Progress(self, plan)
        if not progress.finished:
            shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, exist_ok=True)
        # leftovers of the file whose writing was interrupted
        for path in sorted(scratch.rglob("*")):
            if path.is_file() and str(path.relative_to(scratch)) not in {*progress.finished, PLAN}:
                path.unlink()
        # threads of torch do not pay off for small blocks
        with checksums.verified(self.source.files()), _one_thread():
            formats.get(self.to)().write(view, scratch, replace(self.layout, dtype=None), progress)
        move_into_place(scratch, self.target)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Progress(WriteProgress):
    """Write progress that is recorded in a JSON file, in the same folder as the written files."""

    def __init__(self, conversion: Conversion, plan: Mapping[str, Any]) -> None:
        self._conversion, self._folder = conversion, conversion.scratch
        self._plan = json.loads(json.dumps(plan))
        found = _read_plan(self._folder)
        same = found.get("plan") == self._plan
        self.finished: dict[str, list[int]] = dict(found.get("finished", {})) if same else {}
        # writers finish files in other threads while they ask for the next file
        self._lock = Lock()

    def keeps(self, name: str) -> bool:
        """See `WriteProgress`. A file is reused if its size and checksum are unchanged."""
        path = self._folder / name
        size, crc = self.finished.get(name, (-1, 0))
        if not path.is_file() or path.stat().st_size != size or not _is_as_written(path, crc):
            with self._lock:
                self.finished.pop(name, None)
            return False
        self._conversion.kept.append(name)
        self.advance(size)
        return True

    def advance(self, nbytes: int) -> None:
        self._conversion.advance(nbytes)

    def wrote(self, name: str) -> None:
        path = self._folder / name
        crc = checksums.seal_of(path)
        crc = checksums.crc_of(path) if crc is None else crc
        with self._lock:
            self.finished[name] = [path.stat().st_size, crc]
            self.finished = dict(sorted(self.finished.items()))  # files finish in any order
            write_whole(self._folder / PLAN, checksums.seal_json(
                {"plan": self._plan, "finished": self.finished}))


def _is_as_written(path: Path, crc: int) -> bool:
    if checksums.seal_of(path) is None:
        return checksums.crc_of(path) == crc
    try:
        return checksums.verify(path) and checksums.seal_of(path) == crc
    except checksums.DamagedFile:
        return False


def _read_plan(folder: Path) -> dict[str, Any]:
    try:
        values, sealed = checksums.open_json((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if sealed and isinstance(values, dict) else {}


def without_optimizer(source: Source) -> Source:
    """Return a view of the source that contains no optimizer state."""
    keys = [key for key in source.entries if key[0] in WEIGHTS]
    columns = {field: column for field, column in source.values.get(COLUMNS, {}).items()
               if field in WEIGHTS}
    return View(source, map(source.tensor, keys),
                values={**source.values, COLUMNS: columns, MODEL_ONLY: True})


def _cast_model(one: Derived, dtype: torch.dtype) -> Derived:
    return cast(one, dtype) if one.key[0] == MODEL and one.entry.dtype.is_floating_point else one


_NUMBER = re.compile(r"^(local_experts\.)?\d+\.")


def summary(source: Source) -> dict[str, Any]:
    """Return a checkpoint's format, step, layout, files, fields, layers, tensors and settings."""
    return {
        "format": source.format, "step": source.values.get("step"),
        "layout": dict(source.describe()), "files": len(source.files()),
        "file_bytes": sum(path.stat().st_size for path in source.files()),
        "files_without_checksum": len(source.unsealed()),
        "fields": _fields(source), "layers": _layers(source),
        "settings": plain(_settings(source.values)),
        "tensors": {f"{field}/{name}": {"shape": list(entry.shape), "dtype": _name(entry.dtype)}
                    for (field, name), entry in source.entries.items()},
    }


def _settings(values: Mapping[str, Any]) -> Any:
    """Return the model or run settings that a checkpoint contains. In a plain checkpoint, `extra`
    contains the settings.
    """
    extra = values.get("extra")
    candidates = [values.get(name) for name in ("settings", "model", "config")]
    if isinstance(extra, Mapping):
        candidates += [extra.get("model"), {k: v for k, v in extra.items() if k != "step"}]
    return next(filter(None, candidates), None)


def _fields(source: Source) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for (section, _), entry in source.entries.items():
        row = fields.setdefault(section, {"tensors": 0, "elements": 0, "dtypes": {}})
        row["tensors"] += 1
        row["elements"] += entry.numel
        name = _name(entry.dtype)
        row["dtypes"][name] = row["dtypes"].get(name, 0) + entry.nbytes
    return fields


def _layers(source: Source) -> dict[str, Any]:
    layers = {}
    for prefix, origin in source.layers.items():
        ahead = prefix + "experts."
        shapes: dict[str, Any] = {}
        for (section, name), entry in source.entries.items():
            if section == "model" and name.startswith(ahead):
                own, shape = name.removeprefix(ahead), list(entry.shape)
                each = _NUMBER.sub(r"\1*.", own)  # experts that are stored in separate tensors
                shapes[each if shapes.get(each, shape) == shape else own] = shape
        layers[prefix] = {"num_experts": origin["num_experts"], "experts": shapes}
    return layers


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def plain(value: Any) -> Any:
    """Convert settings to JSON values. Namespaces become mappings. Objects that cannot be
    represented in JSON are converted to strings.
    """
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
