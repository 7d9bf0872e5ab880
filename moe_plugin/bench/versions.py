"""What a number was measured with."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def versions(device: str) -> dict[str, str]:
    """Versions, device and date."""
    found = {
        "python": platform.python_version(), "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu()
    }
    for package in ("moe-plugin", "triton", "megatron-core", "fairseq"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            names = [
                line.split(":", 1)[1].strip() for line in stream if line.startswith("model name")
            ]
    except OSError:
        names = []
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"
