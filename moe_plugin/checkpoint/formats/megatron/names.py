"""Names in Megatron's distributed checkpoints: of files, and of tensors as stored and by layer.

Where all layers are alike, Megatron stores one tensor for all of them: its first axis counts
layers, and the name has no number (`decoder.layers.mlp.router.weight`). Otherwise each layer has
its own. Optimizer state is called `optimizer.state.FIELD.` and the parameter's name. By layer, as
sources have them, every name has its number (`decoder.layers.3.mlp.router.weight`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_plugin.checkpoint.source import MODEL, CheckpointError, Derived, Key, item_of
from moe_plugin.utils.messages import short

LATEST, METADATA = "latest_checkpointed_iteration.txt", ".metadata"
META, COMMON, BACKEND = "moe_plugin.json", "common.pt", "metadata.json"
OURS, NATIVE = "megatron", "megatron_native"  # names of the formats

LAYERS = "decoder.layers."
# Megatron's names of float32 master weights: of the distributed optimizer, and of the other one
MASTERS = ("param", "fp32_param")
MASTER = "master"
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
NATIVE_EXPERTS = "mlp.experts.experts."


def by_layer(tensors: Mapping[str, Derived]) -> Iterator[Derived]:
    """Tensors of a checkpoint by field and numbered name."""
    for stored, one in tensors.items():
        field, name = split_field(stored)
        if is_stacked(name):
            for layer in range(one.entry.shape[0]):
                key = (field, f"{LAYERS}{layer}.{name.removeprefix(LAYERS)}")
                yield replace(item_of(one, layer), key=key)
        else:
            yield replace(one, key=(field, name))


def is_stacked(name: str) -> bool:
    """Whether it is that of a tensor of all layers."""
    return name.startswith(LAYERS) and not _NUMBERED.fullmatch(name)


def split_field(stored: str) -> tuple[str, str]:
    """Field and parameter of a stored tensor's name."""
    found = _OPTIMIZER.fullmatch(stored)
    if not found:
        return MODEL, stored
    return MASTER if found[1] in MASTERS else found[1], found[2]


def stored_name(key: Key, master: str) -> str:
    """The name that a tensor is stored under, with its number.

    master: one of `MASTERS`.
    """
    field, name = key
    if field == MODEL:
        return name
    return f"optimizer.state.{master if field == MASTER else field}.{name}"


def without_number(name: str) -> tuple[str, int | None]:
    """A layer's name without its number, and the number; None: it has none."""
    found = _NUMBERED.fullmatch(name)
    return (LAYERS + found[2], int(found[1])) if found else (name, None)


def layer_numbers(names: Iterable[str]) -> list[int]:
    """Numbers of the layers that names name, in order."""
    return sorted({int(found[1]) for found in map(_NUMBERED.fullmatch, names) if found})


def moe_layers(tensors: Iterable[Derived]) -> dict[str, dict[str, Any]]:
    """Prefix of every MoE layer, with its number of experts; ours or Megatron's own."""
    found: dict[str, dict[str, Any]] = {}
    for one in tensors:
        prefix, experts, _ = one.key[1].partition("experts.")
        if one.key[0] == MODEL and experts and prefix.endswith("mlp."):
            found[prefix] = {"num_experts": one.entry.shape[0]}
    return found


def is_native(names: Iterable[str]) -> bool:
    """Whether experts are Megatron's own."""
    return any(NATIVE_EXPERTS in name for name in names)


def object_name(key: str, offsets: Iterable[int] = (0,), shape: Iterable[int] = (1,)) -> str:
    """Name of an object: one of `shape` many that share a key."""
    return f"{key}/shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, shape))}"


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a distributed checkpoint of Megatron, or the folder above some."""
    if (path / LATEST).is_file():
        if (path / LATEST).stat().st_size > 16:
            return False
        path = folder_of(path)
    return (path / METADATA).is_file() and (path / BACKEND).is_file()


def folder_of(path: Path) -> Path:
    """The checkpoint's own folder: the newest one where `path` is the folder above.

    Raises:
        CheckpointError: the file that names the newest one is damaged.
    """
    if not (path / LATEST).is_file():
        return path
    text = (path / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return path / text
    if not text.isdecimal() or len(text) > 15:
        raise CheckpointError(
            f"{str(path / LATEST)!r} contains {short(text)}, must contain the number of an "
            "iteration; write the number of one of the folders iter_... there")
    return path / f"iter_{int(text):07d}"


def format_of(path: Path) -> str:
    """`megatron` or, where experts are Megatron's own, `megatron_native`; from the index alone."""
    content = (folder_of(path) / METADATA).read_bytes()
    return NATIVE if NATIVE_EXPERTS.encode() in content else OURS
