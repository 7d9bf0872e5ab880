"""Families of decoder models in Hugging Face's `transformers`, a file each with one `FAMILY`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from moe_plugin.checkpoint.formats.huggingface.family import Block, Family
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.messages import short


def _found() -> Iterator[Family]:
    for module in iter_modules(__path__, f"{__name__}."):
        yield import_module(module.name).FAMILY


FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _found()}

_BY_TYPE = {name: family for family in FAMILIES.values()
            for name in (family.model_type, *family.also)}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a configuration; `CheckpointError` where it is of none that is known."""
    name = config.get("model_type")
    if name not in _BY_TYPE:
        raise CheckpointError(f"config.json: model_type={short(name)} is not known; known: "
                              f"{', '.join(_BY_TYPE)}")
    return _BY_TYPE[name]


def moe_block_of(config: Mapping[str, Any]) -> Block | None:
    """Its MoE layers; None: it has none, or its family is not known."""
    family = _BY_TYPE.get(str(config.get("model_type")))
    return None if family is None else family.block
