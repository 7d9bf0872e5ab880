"""Records of the planner from YAML files: clusters, devices, models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from moe_plugin.utils.messages import cut, short
from moe_plugin.utils.yaml_file import read_yaml

T = TypeVar("T")


def record(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Plain nested values as a dataclass of type `kind`.

    Args:
        kind: a dataclass; OmegaConf converts values to the types of its fields.
        where: what errors call the values.
    Raises: ValueError: unknown keys, missing or wrong values.
    """
    from omegaconf import OmegaConf  # slow to import, and many programs read no such file
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    schema = OmegaConf.structured(kind)
    _make_writable(schema)
    try:
        return OmegaConf.to_object(OmegaConf.merge(schema, values))
    except ConfigKeyError as error:
        known = ", ".join(f.name for f in fields(error.object_type or kind))
        raise ValueError(
            f"{where}: unknown key {short(error.full_key)}; known keys: {known}") from error
    except OmegaConfBaseException as error:
        reason = cut(str(error).split("\n")[0])
        raise ValueError(f"{where}: {error.full_key} {reason}; correct the file") from error
    # out of the bounds of the record; OmegaConf converts as Python does: integers beyond floats
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{where}: {cut(str(error), 600)}") from error


def _make_writable(schema: Any) -> None:
    """Frozen dataclasses are read-only schemas, and so are those inside them."""
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.set_readonly(schema, False)
    for name in schema:
        node = None if OmegaConf.is_missing(schema, name) else schema[name]
        if isinstance(node, DictConfig):
            _make_writable(node)


def load_record(kind: type[T], path: str | Path, what: str, remedy: str) -> T:
    """Read a YAML file into a dataclass of type `kind`.

    Args:
        what: what errors call the file, e.g. "cluster file".
        remedy: what they recommend.
    Raises: ValueError: the file cannot be read, or its values do not fit.
    """
    return record(kind, read_yaml(path, what, remedy), f"{what} {short(str(path))}")
