"""`Comm` over Megatron's process groups. What this host sends itself goes through it, as a layer's
exchanges do, so that an error names rank, group and collective. Importing this imports nothing of
Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from moe_plugin.comm import LocalComm, TorchComm
from moe_plugin.comm.base import Comm
from moe_plugin.config import MoEConfig, with_overrides


def comm_of(group: Any = None, timeout_s: float = 1800.0) -> Comm:
    """The `Comm` of one of Megatron's groups; None: of all ranks.

    timeout_s: how long a collective may take, where the group itself allows as much.
    """
    size = dist.get_world_size(group)
    return LocalComm() if size == 1 else TorchComm(group, timeout_s)


def timeout_of(settings: Mapping[str, Any]) -> float:
    """`comm.timeout_s` of settings by dotted paths, in seconds.

    Raises:
        ValueError: it is out of bounds.
    """
    given = {path: settings[path] for path in ("comm.timeout_s",) if path in settings}
    return with_overrides(MoEConfig(), given).comm.timeout_s
