"""The speeds of devices, links and clusters, the YAML files in which they are stored, and the
devices and networks that have a name on the command line.

The speeds of named devices and networks come from data sheets and were not measured. A network
reaches the same fractions of its data sheet as in `configs/clusters/a100_ib.yaml`, 5/6 within a
node and 0.88 between nodes, and has the latencies of this file. The files in `configs/devices`
state the fractions for devices.

Bytes per second and direction that the links between the devices of a node reach according to the
data sheets: NVLink 3 of the A100 300e9 (NVIDIA A100 data sheet, 600 GB/s in both directions),
NVLink 4 of the H100 and H200 450e9 (NVIDIA H100 and H200 data sheets, 900 GB/s), NVLink 5 of the
B200 900e9 (NVIDIA DGX B200 data sheet, 1.8 TB/s), Infinity Fabric of the MI300X 448e9 (AMD MI300X
data sheet, seven links of 128 GB/s in both directions), NVLink 2 of the V100 150e9 (NVIDIA V100
data sheet, 300 GB/s), PCIe 4.0 and 5.0 with 16 lanes 31.5e9 and 63e9 (PCI-SIG).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_plugin.planner.units import load_record
from moe_plugin.utils.messages import did_you_mean, short, similar_names

MAX_NUMBER = 1e30  # more than any processor reaches, and small enough that products stay finite


# Plans leave this share of the memory free for fragmentation, communication buffers and libraries.
HEAD_ROOM = 0.08


@dataclass(frozen=True, kw_only=True)
class Device:
    """Speed and memory of the processor that one rank uses.

    Attributes:
        name: name of the device.
        flops: throughput that large matmuls reach in practice, in FLOP/s.
        half_rows: number of rows for which a matmul reaches half of `flops`. With n rows, the
            efficiency is `n / (n + half_rows)`.
        memory_bytes_s: memory bandwidth, in bytes per second.
        launch_s: fixed time of each operation, in seconds.
        memory_bytes: memory of one rank, in bytes. Plans leave the fraction `HEAD_ROOM` of this
            memory free.
        fit_error: mean relative error between the fitted model and the measurements, or None if the
            values come from a data sheet.
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
                                 f"{MAX_NUMBER:g}; correct the device file")

    @property
    def usable_bytes(self) -> float:
        """Number of bytes of memory that a plan may use. The fraction `HEAD_ROOM` is not included.
        """
        return (1 - HEAD_ROOM) * self.memory_bytes

    def matmul_s(self, rows: float, flops: float, traffic: float = 0.0) -> float:
        """Predict the time in seconds of a matmul, including one launch, with the roofline model.

        Args:
            rows: number of rows of the matmul, which determines how efficiently the device
                computes.
            flops: number of floating-point operations of the matmul.
            traffic: number of bytes that the matmul reads and writes. Defaults to 0.
        """
        if flops <= 0:
            return 0.0
        reached = self.flops * rows / (rows + self.half_rows)
        return self.launch_s + max(flops / reached, traffic / self.memory_bytes_s)

    def copy_s(self, size: float) -> float:
        """Predict the time in seconds to read and write `size` bytes of memory."""
        return self.launch_s + 2 * size / self.memory_bytes_s if size else 0.0


def load_device(path: str | Path) -> Device:
    """Read a device file, such as the files in `configs/devices/`.

    Raises:
        ValueError: If the file cannot be read, or if it does not describe a `Device`.
    """
    return load_record(Device, path, "device file", "see configs/devices/")


# more than any cluster has, so that searches and sums stay bounded
MAX_RANKS, MAX_SECONDS = 1 << 20, 1e9


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link. A network link on which a message takes `alpha_s` seconds plus `beta_s` seconds per
    byte.
    """

    alpha_s: float = 0.0
    beta_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value <= MAX_SECONDS:
                raise ValueError(f"link {name}={value} must be a number from 0 to {MAX_SECONDS:g}; "
                                 "repeat the calibration or correct the file")

    def seconds(self, messages: float, size: float) -> float:
        """Predict the time in seconds to send several messages one after the other, with `size`
        bytes in total.
        """
        return messages * self.alpha_s + size * self.beta_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes, ranks and links of a cluster.

    Attributes:
        name: name of the cluster.
        nodes, ranks_per_node: number of nodes and number of ranks per node, called N and P in the
            formulas.
        nics: number of network cards per node. Each network card is shared by the same number of
            ranks.
        intra: link between two ranks of the same node.
        inter: link from a network card to other nodes.
        copy_s: time in seconds to read or write one byte in a memory copy.
        phase_s: fixed time of each phase, in seconds, for propagation delay and synchronization.
        host: CPU cost of each message and of each byte, if a single machine emulates the cluster.
            Otherwise zero. See `planner.all_to_all_cost`.
        wake_s: CPU time in seconds to wake up a rank, if a single machine emulates the cluster.
            Otherwise 0.
        fit_error: mean relative error between the fitted model and the measurements, or None if
            nothing was measured.
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
                                 f"{MAX_RANKS}; correct this value")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"cluster nodes={self.nodes} x ranks_per_node={self.ranks_per_node} "
                             f"has more than {MAX_RANKS} ranks, the largest number that is "
                             "allowed. Use fewer nodes or ranks per node")
        for name in ("copy_s", "phase_s", "wake_s", "fit_error"):
            if not 0 <= (getattr(self, name) or 0) <= MAX_SECONDS:
                raise ValueError(f"cluster {name}={getattr(self, name)} must be a number from 0 to "
                                 f"{MAX_SECONDS:g}; correct the cluster file")

    @property
    def ranks(self) -> int:
        """Total number of ranks in the cluster."""
        return self.nodes * self.ranks_per_node

    def machine_s(self, wakes: float, messages: float, size: float) -> float:
        """Predict the CPU time in seconds that sending messages costs on an emulated cluster.

        Args:
            wakes: total number of times that ranks are woken up.
            messages: total number of messages.
            size: total size of all messages in bytes.
        """
        return wakes * self.wake_s + self.host.seconds(messages, size)

    @property
    def sizes(self) -> dict[int, int]:
        """Mapping from a number of ranks per node to the number of nodes that have this many ranks.
        """
        return {self.ranks_per_node: self.nodes}

    @property
    def between(self) -> float:
        """Fraction of the bytes that leave the node if every rank sends the same number of bytes to
        every rank.
        """
        return 1 - 1 / self.nodes

    def resized(self, nodes: int, ranks_per_node: int | None = None) -> Cluster:
        """Return a cluster with the same links, but with a different number of nodes and of ranks
        per node.
        """
        links = {f.name: getattr(self, f.name) for f in dataclasses.fields(Cluster)}
        return Cluster(**links | {"nodes": nodes,
                                  "ranks_per_node": ranks_per_node or self.ranks_per_node})

    def with_nodes(self, sizes: Sequence[int]) -> Cluster:
        """Return a cluster with the same links, but with nodes of the given sizes.

        Args:
            sizes: number of ranks of each node.
        """
        equal = self.resized(len(sizes), max(sizes))
        if len(set(sizes)) == 1:
            return equal
        return UnequalCluster(**vars(equal), of_nodes=tuple(sizes))

    def with_ranks(self, ranks: int) -> Cluster:
        """Return a cluster with the same links and `ranks` ranks. The ranks fill whole nodes, or
        only part of a single node.

        Raises:
            ValueError: If the number of ranks is larger than one node and not a multiple of the
                node size.
        """
        if ranks < 1:
            raise ValueError(f"the number of ranks is {ranks}; it must be at least 1")
        if ranks <= self.ranks_per_node:
            return self.resized(1, ranks)
        if ranks % self.ranks_per_node:
            raise ValueError(
                f"{ranks} ranks do not fill the nodes of cluster {short(self.name)}, which have "
                f"{self.ranks_per_node} ranks each. Use a multiple of {self.ranks_per_node} ranks")
        return self.resized(ranks // self.ranks_per_node)


@dataclass(frozen=True, kw_only=True)
class UnequalCluster(Cluster):
    """A cluster in which nodes have different numbers of ranks.

    Attributes:
        of_nodes: number of ranks of each node, the largest of which is `ranks_per_node`.
    """

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
    """Read a cluster from a YAML file.

    Raises:
        ValueError: If the file cannot be read, or if it contains invalid values.
    """
    return load_record(Cluster, path, "cluster file", "create one with `moe-plugin calibrate`")


def dump_cluster(cluster: Cluster, comment: str = "") -> str:
    """Return the text of a cluster file. The file starts with the given comment."""
    import yaml  # imported late: programs that neither read nor write files do not need it

    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.safe_dump(dataclasses.asdict(cluster), sort_keys=False)


# name on the command line: file in configs/devices, and links within a node in bytes per second
DEVICES = {
    "a100": ("a100_80g", 300e9), "b200": ("b200", 900e9), "h100": ("h100", 450e9),
    "h200": ("h200", 450e9), "mi300x": ("mi300x", 448e9), "v100": ("v100_32g", 150e9),
}
# links between nodes: bits per second of one card per device (HDR and NDR InfiniBand, Ethernet)
BETWEEN = {f"{kind}{rate}": rate * 1e9 for kind, rates in {
    "ib": (100, 200, 400, 800), "roce": (100, 200, 400)}.items() for rate in rates}
WITHIN = {"pcie4": 31.5e9, "pcie5": 63e9}  # instead of the device's own links
PER_NODE = 8  # devices per node in the servers of the data sheets
OWN_LINKS = ("nvlink", "xgmi")
WITHIN_S, BETWEEN_S, WITHIN_SHARE, BETWEEN_SHARE = 3e-6, 5e-6, 5 / 6, 0.88


def device_of(given: str) -> Device:
    """Return a device by its name, or from its file.

    Raises:
        ValueError: If there is neither a device nor a file with this name.
    """
    if given.lower() in DEVICES:
        return load_device(f"configs/devices/{DEVICES[given.lower()][0]}.yaml")
    if not Path(given).suffix and not Path(given).is_file():
        raise _unknown("--device", given, list(DEVICES),
                       "a file written by `moe-plugin profile-device`")
    return load_device(given)


def cluster_of(network: str, gpus: int, device: str, per_node: int | None = None) -> Cluster:
    """Return `gpus` devices that are connected by a named network.

    Args:
        network: name of the links between nodes, optionally after the links within a node and a
            `+`, such as `ib400`, `nvlink+ib400` or `pcie4+roce100`.
        gpus: number of devices.
        device: the name of the device, which determines the links within a node.
        per_node: number of devices per node. Defaults to at most 8.
    Raises:
        ValueError: If a name is unknown, or if the devices do not fill the nodes.
    """
    within, _, between = network.lower().rpartition("+")
    if between not in BETWEEN:
        raise _unknown("--network", network, list(BETWEEN), "--cluster FILE instead")
    if within not in ("", *OWN_LINKS, *WITHIN):
        raise _unknown("--network", network, [*OWN_LINKS, *WITHIN], "no links before the +")
    own = DEVICES.get(device.lower(), ("", WITHIN["pcie4"]))[1]
    speed = WITHIN.get(within, own)
    rate = BETWEEN[between] / 8
    size = per_node or min(gpus, PER_NODE)
    return Cluster(
        name=network, nodes=1, ranks_per_node=size, nics=size,
        intra=Link(alpha_s=WITHIN_S, beta_s=1 / (speed * WITHIN_SHARE)),
        inter=Link(alpha_s=BETWEEN_S, beta_s=1 / (rate * BETWEEN_SHARE)),
        copy_s=1 / device_of(device).memory_bytes_s).with_ranks(gpus)


def _unknown(option: str, given: str, names: list[str], remedy: str) -> ValueError:
    return ValueError(f"{option} {short(given)} is unknown; "
                      f"{did_you_mean(similar_names(given.lower(), names))}"
                      f"known names: {', '.join(names)}. Or use {remedy}")
