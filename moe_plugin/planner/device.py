"""A processor as numbers: what arithmetic, memory traffic and launches cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's processor.

    flops: arithmetic of large matrix products that is reached in practice, FLOP/s. half_rows: rows
    of a product at which half of it is reached (efficiency n / (n + half_rows)). memory_bytes_s:
    memory traffic, bytes/s. launch_s: fixed cost of one operation.
    memory_bytes: what a rank may fill.
    """

    name: str = "device"
    flops: float = 1e12
    half_rows: float = 64.0
    memory_bytes_s: float = 1e11
    launch_s: float = 5e-6
    memory_bytes: float = 16e9

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self)[1:]:
            value = getattr(self, f.name)
            least = 0 if f.name in ("half_rows", "launch_s") else 1
            if not least <= value < float("inf"):
                raise ValueError(
                    f"device {f.name}={value} must be a finite number >= {least}; correct the file")

    def product_s(self, rows: float, flops: float, traffic: float = 0.0) -> float:
        """Roofline of a matrix product of `rows` rows: the slower of arithmetic and of moving
        `traffic` bytes, plus a launch.
        """
        if flops <= 0:
            return 0.0
        reached = self.flops * rows / (rows + self.half_rows)
        return self.launch_s + max(flops / reached, traffic / self.memory_bytes_s)

    def copy_s(self, size: float) -> float:
        """Time to read and write `size` bytes each."""
        return self.launch_s + 2 * size / self.memory_bytes_s if size else 0.0


def device_from_dict(values: Mapping[str, Any], where: str = "device") -> Device:
    """Plain values to a `Device`; unknown keys and wrong types are a `ValueError`."""
    known = [f.name for f in dataclasses.fields(Device)]
    for key in values:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; known keys: {', '.join(known)}")
    try:
        return Device(**{k: str(v) if k == "name" else float(v) for k, v in values.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def load_device(path: str | Path) -> Device:
    """Read a device file (`configs/devices/`); what is missing or no YAML mapping is a
    `ValueError`.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"device file {str(path)!r} cannot be read ({error}); see configs/devices/") from error
    if not isinstance(values, Mapping):
        raise ValueError(
            f"device file {str(path)!r} holds a {type(values).__name__}, not a mapping; see "
            "configs/devices/"
        )
    return device_from_dict(values, f"device file {str(path)!r}")
