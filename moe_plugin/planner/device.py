"""A processor as numbers: cost of arithmetic, memory traffic and launches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from moe_plugin.planner.files import load_record

MAX_NUMBER = 1e30  # more than any processor has; products stay finite


# share of the memory that plans leave free, for fragmentation, communication buffers and libraries
HEAD_ROOM = 0.08


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's processor.

    Attributes:
        flops: FLOP/s that large matmuls reach in practice.
        half_rows: rows of a matmul at which half of it is reached (efficiency n / (n +
            half_rows)).
        memory_bytes_s: memory bandwidth, bytes/s.
        launch_s: fixed seconds of one operation.
        memory_bytes: memory of a rank. Plans leave `HEAD_ROOM` of it free.
        fit_error: mean relative error of the fit to what was measured; None: estimated after a
            data sheet, not measured.
    """

    name: str = "device"
    flops: float = 1e12
    half_rows: float = 64.0
    memory_bytes_s: float = 1e11
    launch_s: float = 5e-6
    memory_bytes: float = 16e9
    fit_error: float | None = None

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self)[1:]:
            value = getattr(self, f.name)
            if f.name == "fit_error" and value is None:
                continue
            least = 0 if f.name in ("half_rows", "launch_s", "fit_error") else 1
            if not least <= value <= MAX_NUMBER:
                raise ValueError(f"device {f.name}={value} must be a number from {least} to "
                                 f"{MAX_NUMBER:g}; correct the file")

    @property
    def usable_bytes(self) -> float:
        """Bytes that a plan may use: what the head-room leaves."""
        return (1 - HEAD_ROOM) * self.memory_bytes

    def matmul_s(self, rows: float, flops: float, traffic: float = 0.0) -> float:
        """Roofline seconds of a matmul of `rows` rows that moves `traffic` bytes, plus a launch."""
        if flops <= 0:
            return 0.0
        reached = self.flops * rows / (rows + self.half_rows)
        return self.launch_s + max(flops / reached, traffic / self.memory_bytes_s)

    def copy_s(self, size: float) -> float:
        """Seconds to read and write `size` bytes."""
        return self.launch_s + 2 * size / self.memory_bytes_s if size else 0.0


def load_device(path: str | Path) -> Device:
    """Read a device file (`configs/devices/`); `ValueError` if it does not hold a `Device`."""
    return load_record(Device, path, "device file", "see configs/devices/")
