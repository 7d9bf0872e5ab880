"""What was measured on one's own ranks, as files that later plans reuse.

A `MeasuredNetwork` has the exchanges and the cluster that was fitted to them, a `Processor` the
matmuls and parts of a model with the device that was fitted to them. Both keep every repeat, from
which `planner.trust` says how well the fits describe what was measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from moe_plugin.messages import short
from moe_plugin.planner.cluster import MAX_RANKS, Cluster
from moe_plugin.planner.device import Device
from moe_plugin.planner.files import load_record
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.prediction import MAX_SKEW

REMEDY = "measure again with --fresh"
MAX_SECONDS, MAX_SIZE, MAX_TIMINGS = 1e6, 1e18, 10_000

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
MATMUL, MOE, DENSE, TENSOR, HEAD, UPDATE, UPDATES = (
    "matmul", "MoE layer", "dense layer", "tensor-parallel", "output head", "optimizer step",
    "optimizer step of small tensors")
# steps of the host itself that its network has no part in; their size: layers
HOST, HOST_UPDATE, HOST_LAYERS, HOST_SEQUENCES = "host products", "host optimizer", (1, 2), 8


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One thing that was measured.

    Attributes:
        name: an all-to-all algorithm, or one of the names above.
        size: bytes per rank (exchanges; of an all-gather and a reduce-scatter a rank's part), rows
            (matmul), tokens of a rank (parts of a model), parameters (optimizer step), tensors (the
            same of small ones), layers (host's own).
        seconds: of each repeat, on the slowest rank.
    """

    name: str
    size: float
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.size <= MAX_SIZE:
            raise ValueError(f"size={self.size} of {short(self.name)} must be > 0 and at most "
                             f"{MAX_SIZE:g}; {REMEDY}")
        if not self.seconds or not all(0 < s <= MAX_SECONDS for s in self.seconds):
            raise ValueError(f"seconds of {short(self.name)} must be numbers > 0 and at most "
                             f"{MAX_SECONDS:g}, at least one; {REMEDY}")

    @property
    def median(self) -> float:
        """Of the repeats, the upper one of two."""
        return sorted(self.seconds)[len(self.seconds) // 2]


def _check(timings: list[Timing]) -> None:
    if not 1 <= len(timings) <= MAX_TIMINGS:
        raise ValueError(f"{len(timings)} timings must be 1 to {MAX_TIMINGS}; {REMEDY}")


@dataclass(frozen=True, kw_only=True)
class MeasuredNetwork:
    """Exchanges on real ranks.

    Attributes:
        about: what ranks must have in common with these to reuse it.
        cluster: fitted, and of the size that was measured.
        timings: all-to-alls by algorithm, all-reduces, all-gathers, reduce-scatters.
    """

    about: dict[str, str] = field(default_factory=dict)
    cluster: Cluster = field(default_factory=Cluster)
    timings: list[Timing] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check(self.timings)


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Matmuls and parts of a model on real ranks, all of which compute at the same time.

    Args:
        about: see `MeasuredNetwork`.
        device: fitted.
        model: whose parts they are; `model.experts` are those of the layer that was measured.
        timings: matmuls, parts, an optimizer step.
        tensor_ranks: that shared the tensor-parallel layer, whose sizes are the tokens that they
            had together; 1: none.
        skew: rows of the busiest rank over the mean, in steps of the host; 1: not measured.
    """

    about: dict[str, str] = field(default_factory=dict)
    device: Device = field(default_factory=Device)
    model: ModelShape = field(default_factory=lambda: ModelShape(layers=1, model_dim=1, ffn_dim=1))
    timings: list[Timing] = field(default_factory=list)
    tensor_ranks: int = 1
    skew: float = 1.0

    def __post_init__(self) -> None:
        _check(self.timings)
        if not 1 <= self.tensor_ranks <= MAX_RANKS:
            raise ValueError(f"tensor_ranks={short(self.tensor_ranks)} must be from 1 to "
                             f"{MAX_RANKS:,}; {REMEDY}")
        if not 1 <= self.skew <= MAX_SKEW:
            raise ValueError(f"skew={short(self.skew)} must be from 1 to {MAX_SKEW:g}; {REMEDY}")


Record = TypeVar("Record", MeasuredNetwork, Processor)


def dump(record: MeasuredNetwork | Processor) -> str:
    """The text of a file."""
    return json.dumps(asdict(record), indent=1) + "\n"


def load(kind: type[Record], path: str | Path) -> Record:
    """Read such a file; `ValueError` where it does not hold one."""
    return load_record(kind, path, "file of measurements", REMEDY)
