"""Summarize a checkpoint as JSON values. The values of tensors are not read."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from moe_plugin.checkpoint.source import Source

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
    for (field, _), entry in source.entries.items():
        row = fields.setdefault(field, {"tensors": 0, "elements": 0, "dtypes": {}})
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
        for (field, name), entry in source.entries.items():
            if field == "model" and name.startswith(ahead):
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
