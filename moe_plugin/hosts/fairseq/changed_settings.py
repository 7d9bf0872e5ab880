"""Which settings of a run are not the defaults, as one line of the log, for people and the report.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from moe_plugin.observe.history.fairseq_log import CHANGED


def changed_line(cfg: Any) -> str:
    """The line of the log that names the settings, with value and default; see `changed`."""
    return f"{CHANGED} {json.dumps(changed(cfg))}"


def changed(cfg: Any) -> dict[str, tuple[str, str]]:
    """Settings that differ from their defaults: (value, default) by the flag's name.

    What an architecture sets differs from the defaults of its model. Settings whose defaults
    are not declared are left out.

    Args:
        cfg: all settings of fairseq, by group.
    """
    found: dict[str, tuple[str, str]] = {}
    for group, kind in FairseqConfig.__dataclass_fields__.items():
        values = cfg.get(group)
        if values is None or group.startswith("_"):
            continue
        values = vars(values) if isinstance(values, Namespace) else values
        for name, default in _defaults(group, kind, values).items():
            default = _resolved(default, cfg)
            if name in values and str(values[name]) != str(default):
                found.setdefault(name.replace("_", "-"), (str(values[name]), str(default)))
    return found


def _defaults(group: str, kind: dataclasses.Field[Any], values: Mapping[str, Any]
              ) -> dict[str, Any]:
    """The declared defaults of a group's settings; {} where nothing declares them."""
    name = values.get("_name") or values.get("arch")
    declared = {
        "model": MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name, name)),
        "task": TASK_DATACLASS_REGISTRY.get(name)
    }.get(group) or REGISTRIES.get(group, {}).get("dataclass_registry", {}).get(name)
    record = declared() if declared else kind.default
    if not dataclasses.is_dataclass(record):
        return {}
    return {one.name: getattr(record, one.name) for one in dataclasses.fields(record)
            if not one.name.startswith("_")}


def _resolved(default: Any, cfg: Any) -> Any:
    """A default that is another group's setting: its value."""
    if isinstance(default, str) and default.startswith("${"):
        return OmegaConf.select(cfg, default[2:-1])
    return default
