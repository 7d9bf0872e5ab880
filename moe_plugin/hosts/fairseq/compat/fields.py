"""New fields for fairseq's dataclasses of settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, make_dataclass
from typing import Any

from moe_plugin.config.flags import FlagSpec


def hydra_sees_fields() -> None:
    """fairseq registers its dataclasses with Hydra when it is imported: again, with new fields."""
    from fairseq.dataclass.initialize import hydra_init

    hydra_init()


def flag_metadata(spec: FlagSpec) -> dict[str, str]:
    """What fairseq reads of a field to make the flag of `spec`."""
    const = {"argparse_const": "true"} if spec.kind is bool else {}
    return {"help": spec.help.replace("%", "%%"), **const}


def add_field(settings: type, name: str, kind: Any, default: Any, help: str,
              **metadata: Any) -> None:
    """Give a dataclass of fairseq's, which has fields and a flag for each, one more.

    Instances that exist read the default. Nothing happens where fairseq has the field.

    Args:
        settings: the dataclass. kind: type of the field. help: text.
        metadata: what else fairseq reads there, e.g. `argparse_const`.
    """
    if name in settings.__dataclass_fields__:  # type: ignore[attr-defined]
        return
    made = make_dataclass(
        settings.__name__,
        [(name, kind, field(default=default, metadata={"help": help, **metadata}))])
    settings.__dataclass_fields__[name] = made.__dataclass_fields__[name]  # type: ignore[attr-defined]
    settings.__annotations__[name] = kind
    setattr(settings, name, default)


SHIMS: tuple[Callable[[], None], ...] = (hydra_sees_fields,)
