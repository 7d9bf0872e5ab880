"""New fields for fairseq's dataclasses of settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, make_dataclass
from typing import Any


def hydra_sees_fields() -> None:
    """fairseq registers its dataclasses with Hydra when it is imported: again, with new fields."""
    from fairseq.dataclass.initialize import hydra_init

    hydra_init()


def add_field(settings: type, name: str, kind: Any, default: Any, text: str) -> None:
    """Give a dataclass of fairseq's, which has fields and a flag for each, one more.

    Instances that exist read the default. Nothing happens where fairseq has the field.

    Args:
        settings: the dataclass. kind: type of the field. text: help.
    """
    if name in settings.__dataclass_fields__:  # type: ignore[attr-defined]
        return
    made = make_dataclass(settings.__name__,
                          [(name, kind, field(default=default, metadata={"help": text}))])
    settings.__dataclass_fields__[name] = made.__dataclass_fields__[name]  # type: ignore[attr-defined]
    settings.__annotations__[name] = kind
    setattr(settings, name, default)


SHIMS: tuple[Callable[[], None], ...] = (hydra_sees_fields,)
