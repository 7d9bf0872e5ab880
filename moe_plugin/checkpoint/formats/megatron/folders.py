"""Folders of distributed checkpoints: names of their files, and what they are, without torch's
distributed checkpoint, which takes a second to import.
"""

from __future__ import annotations

from pathlib import Path

from moe_plugin.checkpoint.formats.megatron import names
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.messages import short

LATEST, METADATA = "latest_checkpointed_iteration.txt", ".metadata"
META, COMMON, BACKEND = "moe_plugin.json", "common.pt", "metadata.json"
OURS, NATIVE = "megatron", "megatron_native"  # names of the formats


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
    return NATIVE if names.NATIVE_EXPERTS.encode() in content else OURS
