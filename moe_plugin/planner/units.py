"""Read the planner's YAML files, and parse and format sizes, rates, times and grids."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from moe_plugin.utils.messages import cut, short
from moe_plugin.utils.yaml_file import read_yaml

# Type of a planner record that is read from a YAML file: a cluster, a device or a model.
T = TypeVar("T")


def record(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Convert nested dictionaries to a dataclass of type `kind`.

    Args:
        kind: a dataclass. OmegaConf converts each value to the type of the field.
        values: mapping from field names to values. A nested dataclass is given as a nested mapping.
        where: description of the values for error messages, such as the path of a file.

    Raises:
        ValueError: If a key is unknown, or if a value is missing or invalid.
    """
    # imported late, because OmegaConf loads slowly and many programs read no such file
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    schema = OmegaConf.structured(kind)
    _make_writable(schema)
    try:
        made: Any = OmegaConf.to_object(OmegaConf.merge(schema, values))
        return made
    except ConfigKeyError as error:
        of: Any = error.object_type or kind
        known = ", ".join(f.name for f in fields(of))
        raise ValueError(
            f"{where}: unknown key {short(error.full_key)}. Known keys: {known}") from error
    except OmegaConfBaseException as error:
        reason = cut(str(error).split("\n")[0])
        raise ValueError(f"{where}: {error.full_key} {reason}; correct the file") from error
    # the record rejects the value, or OmegaConf cannot convert an integer that exceeds floats
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{where}: {cut(str(error), 600)}") from error


def _make_writable(schema: Any) -> None:
    """Make a schema and its nested schemas writable. Schemas of frozen dataclasses are read-only by
    default.
    """
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.set_readonly(schema, False)
    for name in schema:
        node = None if OmegaConf.is_missing(schema, name) else schema[name]
        if isinstance(node, DictConfig):
            _make_writable(node)


def load_record(kind: type[T], path: str | Path, what: str, remedy: str) -> T:
    """Read a dataclass of type `kind` from a YAML file.

    Args:
        kind: the dataclass.
        what: description of the file for error messages, such as "cluster file".
        remedy: what the user can do if the file cannot be read, for error messages.

    Raises:
        ValueError: If the file cannot be read, or if its values are not valid for the dataclass.
    """
    return record(kind, read_yaml(path, what, remedy), f"{what} {short(str(path))}")


_SIZES = {
    "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9
}
_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_size(text: str) -> int:
    """Parse a size in bytes, such as `64KiB`, `1MiB`, `100kB` or `512`."""
    return int(_parse(text, _SIZES, "b", "a size such as 64KiB or 1MiB"))


def parse_rate(text: str) -> float:
    """Parse a rate in bits per second, such as `200mbit` or `1gbit`."""
    return _parse(text, _RATES, "bit", "a rate such as 200mbit or 1gbit")


def parse_time(text: str) -> float:
    """Parse a time in seconds, such as `1ms`, `500us` or `2s`."""
    return _parse(text, _TIMES, "s", "a time such as 1ms or 500us")


def parse_grid(text: str) -> tuple[int, int]:
    """Parse a grid of nodes and ranks per node, such as `8x4`."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text.strip())
    if not match:
        raise ValueError(f"{short(text)} is not a grid. Write nodes x ranks per node, "
                         "each from 1 to 999999, e.g. 8x4")
    return int(match[1]), int(match[2])


def parse_counts(name: str, text: str, example: str) -> list[int]:
    """Parse comma-separated integers >= 1, such as `1,2,4`.

    Args:
        name: name of the option, for error messages.
        example: a valid value to show in error messages.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= len(word.strip()) <= 9 and int(word)
               for word in words):
        raise ValueError(f"{name} {short(text)} must be whole numbers from 1 to 999999999, "
                         f"separated by commas, e.g. {example}")
    return [int(word) for word in words]


def show_size(size: float) -> str:
    """Format a size in bytes with three digits, such as `64 KiB`, `1.33 MiB` or `1,250 GiB`."""
    return _shown(size, (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)))


def show_time(seconds: float) -> str:
    """Format a time in seconds with three digits, such as `12.3 us`, `4.5 ms` or `2,100 h`."""
    if seconds == 0:
        return "0 s"
    return _shown(seconds,
                  (("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)))


def show_change(seconds: float) -> str:
    """Format a time difference with its sign, such as `+4.5 ms` or `-26 s`."""
    return ("+" if seconds >= 0 else "") + show_time(seconds)


def _shown(value: float, units: Sequence[tuple[str, float]]) -> str:
    if not math.isfinite(value):
        return str(value)
    for (unit, factor), (_, above) in pairwise(units):
        shown = _three(value / factor)
        if abs(float(shown.replace(",", ""))) < round(above / factor):
            return f"{shown} {unit}"
        value = math.copysign(max(above, abs(value)), value)  # show 999.6 us as 1 ms
    unit, factor = units[-1]
    return f"{_three(value / factor)} {unit}"


def _three(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def _parse(text: str, units: Mapping[str, float], default: str, what: str) -> float:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([a-zA-Z]*)", text.strip())
    unit = (match[2].lower() or default) if match else ""
    if match is None or unit not in units:
        raise ValueError(f"{short(text)} is not {what}")
    return float(match[1]) * units[unit]
