"""On which node does this process run? What its launcher says, and what the host is called."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping

# variables in which launchers tell a process the index of its node (torchrun, Slurm)
_NODE_INDEX = ("GROUP_RANK", "SLURM_NODEID")


def node_name(environment: Mapping[str, str] | None = None) -> str:
    """Launcher's node index where it tells one, and host name: two processes share a node where
    these are equal.

    Both count: containers of different hosts may have one host name, and a launcher may start
    several agents on one host (which are kept apart, because it was asked to).
    """
    environment = os.environ if environment is None else environment
    index = next((f"{name}={environment[name]}" for name in _NODE_INDEX if name in environment), "")
    return f"{index}@{socket.gethostname()}"


def node_key(size: int) -> bytes:
    """A digest of the node's name, `size` bytes long."""
    return hashlib.sha256(node_name().encode()).digest()[:size]
