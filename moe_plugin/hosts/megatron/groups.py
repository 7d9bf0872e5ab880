"""How long Megatron's groups may wait. Importing this imports nothing of Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_plugin.config import MoEConfig, with_overrides


def timeout_of(settings: Mapping[str, Any]) -> float:
    """`comm.timeout_s` of settings by dotted paths, in seconds.

    Raises:
        ValueError: it is out of bounds.
    """
    given = {path: settings[path] for path in ("comm.timeout_s",) if path in settings}
    return with_overrides(MoEConfig(), given).comm.timeout_s
