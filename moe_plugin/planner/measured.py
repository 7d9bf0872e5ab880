"""What was measured on one's own ranks, as files that later plans reuse."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.units import load_record


@dataclass(frozen=True, kw_only=True)
class MeasuredNetwork:
    """The network of real ranks.

    Attributes:
        about: what ranks must have in common with these to reuse it.
        cluster: fitted to measured all-to-alls, of as many ranks as ran.
    """

    about: dict[str, str] = field(default_factory=dict)
    cluster: Cluster = field(default_factory=Cluster)


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The processors of real ranks, all of which compute at the same time.

    Attributes:
        about: see `MeasuredNetwork`.
        device: fitted to measured matrix products.
    """

    about: dict[str, str] = field(default_factory=dict)
    device: Device = field(default_factory=Device)


Record = TypeVar("Record", MeasuredNetwork, Processor)


def dump(record: MeasuredNetwork | Processor) -> str:
    """The text of a file."""
    return json.dumps(asdict(record), indent=1) + "\n"


def load(kind: type[Record], path: str | Path) -> Record:
    """Read such a file; `ValueError` where it does not hold one."""
    return load_record(kind, path, "file of measurements", "measure again with --fresh")
