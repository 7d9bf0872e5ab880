"""Families of decoder models in Hugging Face's `transformers`, a file each with one `FAMILY`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from moe_plugin.checkpoint.formats.huggingface.family import Family
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.messages import short


def _found() -> Iterator[Family]:
    for module in iter_modules(__path__, f"{__name__}."):
        yield import_module(module.name).FAMILY


FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _found()}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a configuration; `CheckpointError` where it is of none that is known."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise CheckpointError(f"config.json: model_type={short(name)} is not known; known: "
                              f"{', '.join(FAMILIES)}")
    return FAMILIES[name]
