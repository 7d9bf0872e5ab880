"""Log the settings of a run that differ from their defaults, in a single line.

The report parses this line.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from moe_plugin.checkpoint.formats.fairseq.entries import plain_value
from moe_plugin.hosts.fairseq.compat.names import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    REGISTRIES,
    TASK_DATACLASS_REGISTRY,
    FairseqConfig,
)
from moe_plugin.hosts.fairseq.models import MoETransformerModel
from moe_plugin.hosts.fairseq.options import MoETransformerFlags
from moe_plugin.observe.history.host_logs import CHANGED
from moe_plugin.observe.history.words import comparable, written
from moe_plugin.observe.model_layers import OFF, ON, chosen

_UNSTATED = object()


def changed_line(cfg: Any) -> str:
    """Return the log line with the settings that the user chose. The line contains the values as
    the user wrote them, and the default values.

    If the command line does not show the settings, for example because a Hydra file is used, the
    line contains all settings that `changed` returns.
    """
    settings, words = changed(cfg), sys.argv[1:]
    settings = {name: (value, "–" if default == "None" else default)
                for name, (value, default) in settings.items()}
    shown = {name: (ON, OFF) if both == ("True", "False") else both
             for name, both in settings.items()}
    named = {} if "config-name" in written(words) else chosen(words, shown)
    return f"{CHANGED} {json.dumps(named or settings)}"


def changed(cfg: Any) -> dict[str, tuple[str, str]]:
    """Return all settings that differ from their defaults, as a dict from flag names to tuples
    (value, default).

    Settings of an architecture are included if they differ from the defaults of the architecture's
    model. Settings that do not declare a default are left out.

    Args:
        cfg: all settings of fairseq, by group.
    """
    differing: dict[str, tuple[str, str]] = {}
    for group, declaration in FairseqConfig.__dataclass_fields__.items():
        values = cfg.get(group)
        if values is None or group.startswith("_"):
            continue
        values = vars(values) if isinstance(values, Namespace) else values
        for name, default in _defaults(group, declaration, values).items():
            default = _resolved(default, cfg)
            value = plain_value(values.get(name, default))
            if comparable(value) != comparable(default):
                differing.setdefault(name.replace("_", "-"), (str(value), str(default)))
    return differing


def _defaults(group: str, declaration: dataclasses.Field[Any], values: Mapping[str, Any]
              ) -> dict[str, Any]:
    """Return the declared defaults of a group's settings, or {} if the group declares none."""
    name: Any = values.get("_name") or values.get("arch")
    declared = {
        "model": MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name, name)),
        "task": TASK_DATACLASS_REGISTRY.get(name)
    }.get(group) or REGISTRIES.get(group, {}).get("dataclass_registry", {}).get(name)
    record = declared() if declared else declaration.default
    if dataclasses.is_dataclass(record):
        return _fields(record)
    return _of_arguments(name, values) if group == "model" else {}


def _fields(record: Any) -> dict[str, Any]:
    return {entry.name: plain_value(getattr(record, entry.name))
            for entry in dataclasses.fields(record)
            if not entry.name.startswith("_")}


def _of_arguments(arch: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a model that declares its settings as command-line arguments.

    If an argument declares a default, this default takes precedence. Some arguments, such as those
    of fairseq's transformer, do not declare a default. For arguments without a default, return the
    values set by the architecture that has the same name as the model.
    """
    model = ARCH_MODEL_REGISTRY.get(arch)
    if model is None:
        return {}
    parser = ArgumentParser(argument_default=_UNSTATED)
    model.add_args(parser)
    defaults = {name: parser.get_default(name) for name in values}
    ours = issubclass(model, MoETransformerModel)
    base = Namespace()
    try:
        ARCH_CONFIG_REGISTRY["transformer" if ours else ARCH_MODEL_NAME_REGISTRY[arch]](base)
    except (KeyError, AttributeError):  # no such architecture, or it needs a user's setting
        pass
    stated = {**vars(base), **(_fields(MoETransformerFlags()) if ours else {})}
    by_name = {name: stated.get(name, default) if default is _UNSTATED else default
               for name, default in defaults.items() if default is not None}
    return {name: default for name, default in by_name.items() if default is not _UNSTATED}


def _resolved(default: Any, cfg: Any) -> Any:
    if isinstance(default, str) and default.startswith("${"):
        return OmegaConf.select(cfg, default[2:-1])
    return default
