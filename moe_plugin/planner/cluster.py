"""A cluster's links as numbers, and their YAML file (`configs/clusters/`)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_plugin.planner.units import load_record
from moe_plugin.utils.messages import short

MAX_NUMBER = 1e30  # more than any processor has; products stay finite


# share of the memory that plans leave free, for fragmentation, communication buffers and libraries
HEAD_ROOM = 0.08


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's processor.

    Attributes:
        flops: FLOP/s that large matmuls reach in practice.
        half_rows: rows of a matmul at which half of it is reached (efficiency n / (n +
            half_rows)).
        memory_bytes_s: memory bandwidth, bytes/s.
        launch_s: fixed seconds of one operation.
        memory_bytes: memory of a rank. Plans leave `HEAD_ROOM` of it free.
        fit_error: mean relative error of the fit to what was measured; None: estimated after a
            data sheet, not measured.
    """

    name: str = "device"
    flops: float = 1e12
    half_rows: float = 64.0
    memory_bytes_s: float = 1e11
    launch_s: float = 5e-6
    memory_bytes: float = 16e9
    fit_error: float | None = None

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self)[1:]:
            value = getattr(self, f.name)
            if f.name == "fit_error" and value is None:
                continue
            least = 0 if f.name in ("half_rows", "launch_s", "fit_error") else 1
            if not least <= value <= MAX_NUMBER:
                raise ValueError(f"device {f.name}={value} must be a number from {least} to "
                                 f"{MAX_NUMBER:g}; correct the file")

    @property
    def usable_bytes(self) -> float:
        """Bytes that a plan may use: what the head-room leaves."""
        return (1 - HEAD_ROOM) * self.memory_bytes

    def matmul_s(self, rows: float, flops: float, traffic: float = 0.0) -> float:
        """Roofline seconds of a matmul of `rows` rows that moves `traffic` bytes, plus a launch."""
        if flops <= 0:
            return 0.0
        reached = self.flops * rows / (rows + self.half_rows)
        return self.launch_s + max(flops / reached, traffic / self.memory_bytes_s)

    def copy_s(self, size: float) -> float:
        """Seconds to read and write `size` bytes."""
        return self.launch_s + 2 * size / self.memory_bytes_s if size else 0.0


def load_device(path: str | Path) -> Device:
    """Read a device file (`configs/devices/`); `ValueError` if it does not hold a `Device`."""
    return load_record(Device, path, "device file", "see configs/devices/")


# more than any cluster has, so that neither searches nor sums grow without bound
MAX_RANKS, MAX_SECONDS = 1 << 20, 1e9


@dataclass(frozen=True, kw_only=True)
class Link:
    """Cost of a message: `alpha_s` seconds each plus `beta_s` seconds per byte (1 / bandwidth)."""

    alpha_s: float = 0.0
    beta_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value <= MAX_SECONDS:
                raise ValueError(f"link {name}={value} must be a number from 0 to {MAX_SECONDS:g}; "
                                 "calibrate again or correct the file")

    def seconds(self, messages: float, size: float) -> float:
        """Seconds of `messages` messages of `size` bytes in total, one after another."""
        return messages * self.alpha_s + size * self.beta_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, ranks and links.

    Attributes:
        nodes, ranks_per_node: N, P.
        nics: network cards per node, shared evenly by its ranks.
        intra: link between ranks of a node.
        inter: link of a network card.
        copy_s: seconds per byte of a memory copy (read or write).
        phase_s: fixed seconds of one round of messages (propagation delay, synchronization).
        host, wake_s: of clusters emulated on one machine, CPU cost of every message, and of
            waking a rank; zero elsewhere. See `planner.all_to_all_cost`.
        fit_error: as a `Device` has it.
    """

    name: str = "cluster"
    nodes: int = 1
    ranks_per_node: int = 1
    nics: int = 1
    intra: Link = field(default_factory=Link)
    inter: Link = field(default_factory=Link)
    copy_s: float = 0.0
    phase_s: float = 0.0
    host: Link = field(default_factory=Link)
    wake_s: float = 0.0
    fit_error: float | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "nics"):
            if not 1 <= getattr(self, name) <= MAX_RANKS:
                raise ValueError(f"cluster {name}={short(getattr(self, name))} must be from 1 to "
                                 f"{MAX_RANKS}; correct it")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"cluster nodes={self.nodes} of ranks_per_node={self.ranks_per_node} "
                             f"must be at most {MAX_RANKS} ranks together; correct it")
        for name in ("copy_s", "phase_s", "wake_s", "fit_error"):
            if not 0 <= (getattr(self, name) or 0) <= MAX_SECONDS:
                raise ValueError(f"cluster {name}={getattr(self, name)} must be a number from 0 to "
                                 f"{MAX_SECONDS:g}; correct the file")

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    def machine_s(self, wakes: float, messages: float, size: float) -> float:
        """CPU seconds of an emulated cluster: `wakes` wake-ups, `messages` of `size` bytes."""
        return wakes * self.wake_s + self.host.seconds(messages, size)

    @property
    def sizes(self) -> dict[int, int]:
        """How many nodes there are of so many ranks."""
        return {self.ranks_per_node: self.nodes}

    @property
    def between(self) -> float:
        """How much leaves its node of what ranks send to all ranks alike."""
        return 1 - 1 / self.nodes

    def resized(self, nodes: int, ranks_per_node: int | None = None) -> Cluster:
        """The same links with another number of nodes (and ranks per node)."""
        links = {f.name: getattr(self, f.name) for f in dataclasses.fields(Cluster)}
        return Cluster(**links | {"nodes": nodes,
                                  "ranks_per_node": ranks_per_node or self.ranks_per_node})

    def with_nodes(self, sizes: Sequence[int]) -> Cluster:
        """The same links with nodes of so many ranks."""
        equal = self.resized(len(sizes), max(sizes))
        if len(set(sizes)) == 1:
            return equal
        return UnequalCluster(**vars(equal), of_nodes=tuple(sizes))

    def with_ranks(self, ranks: int) -> Cluster:
        """The same links with `ranks` ranks: full nodes, or one node that is not full.

        Raises: ValueError: neither is possible.
        """
        if ranks < 1:
            raise ValueError(f"{ranks} ranks: must be at least 1")
        if ranks <= self.ranks_per_node:
            return self.resized(1, ranks)
        if ranks % self.ranks_per_node:
            raise ValueError(
                f"{ranks} ranks do not fill nodes of {self.ranks_per_node} ranks (cluster "
                f"{short(self.name)}); use a multiple")
        return self.resized(ranks // self.ranks_per_node)


@dataclass(frozen=True, kw_only=True)
class UnequalCluster(Cluster):
    """Nodes of unequal size, `ranks_per_node` on the largest. of_nodes: ranks of each."""

    of_nodes: tuple[int, ...]

    @property
    def sizes(self) -> dict[int, int]:
        return Counter(self.of_nodes)

    @property
    def ranks(self) -> int:
        return sum(self.of_nodes)

    @property
    def between(self) -> float:
        return 1 - sum((size / self.ranks) ** 2 for size in self.of_nodes)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file; `ValueError` if it cannot be read or holds wrong values."""
    return load_record(Cluster, path, "cluster file", "make one with `moe-plugin calibrate`")


def dump_cluster(cluster: Cluster, comment: str = "") -> str:
    """The text of a cluster file, with a comment at its top."""
    import yaml  # which programs that read and write no file do without

    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.safe_dump(dataclasses.asdict(cluster), sort_keys=False)
