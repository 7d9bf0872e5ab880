"""This machine: names of its processors, and a folder for results that outlive a run."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import tempfile
from pathlib import Path

import torch


@functools.cache
def cpu_name() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            return next(
                line.split(":", 1)[1].strip() for line in stream if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Name of the processor behind a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def memory_bytes(device: torch.device) -> int | None:
    """Memory of a device, all of it; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def user_cache(purpose: str, folder: Path | None = None) -> Path:
    """A folder of this user that outlives the process, created if missing.

    Below the temporary folder if the home is not writable.

    purpose: what errors say is impossible without it.
    Raises: ValueError: not writable.
    """
    folder = folder or Path.home() / ".cache" / "moe-plugin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"moe-plugin-{os.getuid()}"
        with contextlib.suppress(OSError):  # the check below says it
            folder.mkdir(mode=0o700, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not writable, so {purpose}; make it writable")
    return folder
