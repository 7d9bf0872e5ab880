"""The node on which this process runs, by its launcher and its host name."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping

# variables in which launchers tell a process the index of its node (torchrun, Slurm)
_NODE_INDEX = ("GROUP_RANK", "SLURM_NODEID")


def node_name(environment: Mapping[str, str] | None = None) -> str:
    """The launcher's node index, if it sets one, and the host name.

    Two processes share a node where both are equal: containers on different hosts may have the same
    host name, and a launcher may start several agents on one host, which count as nodes.

    environment: of the process; None: `os.environ`.
    """
    environment = os.environ if environment is None else environment
    index = next((f"{name}={environment[name]}" for name in _NODE_INDEX if name in environment), "")
    return f"{index}@{socket.gethostname()}"


def node_key(size: int) -> bytes:
    """A digest of the node's name, `size` bytes long."""
    return hashlib.sha256(node_name().encode()).digest()[:size]
