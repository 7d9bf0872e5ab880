"""Networks: directed graphs of ranks and switches that are connected by wires with exact
bandwidths.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from moe_plugin.planner.cluster import Cluster, Link
from moe_plugin.utils.messages import short
from moe_plugin.utils.yaml_file import read_yaml

# larger than any network that is scheduled, so that a file cannot request unbounded memory
MAX_NODES = 1 << 16
# limits in GB/s: exact arithmetic is fast only while numbers fit into machine words
SLOWEST, FASTEST = Fraction(1, 10**9), Fraction(10**9)
_NUMBER = re.compile(r"[0-9]{1,40}(\.[0-9]{1,12})?(/[0-9]{1,40})?")
_KEYS = ("name", "ranks", "switches", "links", "one_way")
_DIGITS = 3  # significant digits of a measured bandwidth; more digits only produce more trees


@dataclass(frozen=True, slots=True)
class Wire:
    """One direction of a link.

    Attributes:
        source, target: names of the nodes that the wire connects.
        bandwidth: bandwidth in GB/s (10^9 bytes per second).
        alpha_s: fixed time of each message, in seconds.
    """

    source: str
    target: str
    bandwidth: Fraction
    alpha_s: float = 0.0

    @property
    def ends(self) -> tuple[str, str]:
        """Names of the source node and the target node."""
        return self.source, self.target


@dataclass(frozen=True)
class Network:
    """A network of ranks and switches that are connected by wires.

    Attributes:
        name: name of the network.
        ranks: names of the nodes that compute. Rank i is called `ranks[i]`.
        switches: names of the nodes that only forward data.
        wires: directed wires between nodes. There is at most one wire from one node to another.

    Raises:
        ValueError: If a node occurs twice, if a wire is invalid, if the total bandwidth into a node
            differs from the total bandwidth out of the node, or if some nodes cannot reach each
            other.
    """

    name: str
    ranks: tuple[str, ...]
    switches: tuple[str, ...]
    wires: tuple[Wire, ...]

    def __post_init__(self) -> None:
        where = f"network {short(self.name)}"
        if not self.ranks:
            raise ValueError(f"{where} has 0 ranks; it needs at least 1")
        if len(self.nodes) > MAX_NODES:
            raise ValueError(f"{where} has {len(self.nodes)} nodes, more than the limit of "
                             f"{MAX_NODES}. Plan a part of the network")
        twice = [node for node, count in Counter(self.nodes).items() if count > 1]
        if twice:
            raise ValueError(f"{where}: node {short(twice[0])} is listed twice. Assign a unique "
                             "name to each rank and switch")
        _check_wires(self, where)
        _check_balance(self, where)
        _check_connected(self, where)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all ranks, followed by the names of all switches."""
        return self.ranks + self.switches

    def out_of(self, nodes: Iterable[str]) -> Fraction:
        """Return the total bandwidth, in GB/s, of all wires that leave a set of nodes."""
        inside = set(nodes)
        return sum((w.bandwidth for w in self.wires
                    if w.source in inside and w.target not in inside), Fraction(0))

    def to_dict(self) -> dict[str, Any]:
        """Convert the network to plain values that `from_dict` accepts. Bandwidths are converted to
        strings such as "25/2".
        """
        return {"name": self.name, "ranks": list(self.ranks), "switches": list(self.switches),
                "one_way": [[w.source, w.target, str(w.bandwidth), w.alpha_s] for w in self.wires]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "network") -> Network:
        """Create a network from plain values.

        Args:
            values: mapping with the keys `name`, `ranks`, `switches`, `links` and `one_way`.
                `ranks` and `switches` are lists of node names, or numbers of nodes. Nodes without
                names are called 0, 1, 2 etc. (ranks) and s0, s1, s2 etc. (switches). Each entry of
                `links` has the form [a, b, GB/s] or [a, b, GB/s, alpha_s] and describes both
                directions of a link. Each entry of `one_way` has the same form and describes only
                the direction from a to b. A bandwidth in GB/s is a number or a string such as
                "25/2".
            where: description of the values for error messages, such as the path of the file.

        Raises:
            ValueError: If a key is unknown, if a value has the wrong type, or if the values do not
                describe a valid `Network`.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} must be a mapping with the keys {', '.join(_KEYS)}, got "
                             f"{short(values)}")
        unknown = [key for key in values if key not in _KEYS]
        if unknown:
            raise ValueError(f"{where}: unknown key {short(unknown[0])}. Known keys: "
                             f"{', '.join(_KEYS)}")
        wires = []
        for key in ("links", "one_way"):
            for index, link in enumerate(_list(values.get(key, ()), f"{where}: {key}")):
                wire = _wire(link, f"{where}: {key}[{index}]")
                wires.append(wire)
                if key == "links":
                    wires.append(Wire(wire.target, wire.source, wire.bandwidth, wire.alpha_s))
        return cls(str(values.get("name", "network")),
                   _names(values.get("ranks", ()), f"{where}: ranks", ""),
                   _names(values.get("switches", ()), f"{where}: switches", "s"), tuple(wires))

    @classmethod
    def load(cls, path: str | Path) -> Network:
        """Read a network from a YAML file. The file contains the values that `from_dict` accepts.

        Raises:
            ValueError: If the file cannot be read, or if it does not describe a valid network.
        """
        values = read_yaml(path, "network file", "see docs/collectives.md for an example")
        return cls.from_dict({"name": Path(path).stem, **values},
                             f"network file {short(str(path))}")

    @classmethod
    def from_cluster(cls, cluster: Cluster) -> Network:
        """Convert a cluster to a network that contains one switch per node, the network cards, and
        one global switch.

        The link between a rank and its node's switch has the bandwidth of `cluster.intra`. The link
        between a rank and its network card has the bandwidth of `cluster.inter`. Ranks share
        network cards if a node has fewer cards than ranks, and use several cards if it has more.
        Bandwidths are rounded to 3 significant digits. `alpha_s` and `phase_s` are charged to the
        first wire of each message, on which the message leaves its rank.
        """
        ranks: list[str] = []
        switches: list[str] = []
        wires: list[Wire] = []

        def both(rank: str, switch: str, bandwidth: Fraction, alpha_s: float) -> None:
            wires.append(Wire(rank, switch, bandwidth, alpha_s))
            wires.append(Wire(switch, rank, bandwidth))

        for node in range(cluster.nodes):
            inside = [str(node * cluster.ranks_per_node + i) for i in range(cluster.ranks_per_node)]
            ranks += inside
            if len(inside) > 1:
                rate, switches = _rate(cluster, "intra"), [*switches, f"node{node}"]
                for rank in inside:
                    both(rank, f"node{node}", rate, cluster.intra.alpha_s + cluster.phase_s)
            if cluster.nodes == 1:
                continue
            rate, alpha_s = _rate(cluster, "inter"), cluster.inter.alpha_s + cluster.phase_s
            shared = min(cluster.nics, len(inside))
            for index in range(shared):
                card, users = f"node{node}/nic{index}", inside[index::shared]
                switches.append(card)
                whole = rate * Fraction(cluster.nics, shared)
                both(card, "network", whole, 0.0)
                for rank in users:
                    both(rank, card, whole, alpha_s)
        if cluster.nodes > 1:
            switches.append("network")
        return cls(cluster.name, tuple(ranks), tuple(switches), tuple(wires))


def part_of(network: Network, ranks: Sequence[int]) -> Network:
    """Return the sub-network that consists of the given ranks, in the given order, and the switches
    that these ranks can reach.

    Wires of all other ranks are omitted, because ranks do not forward data for each other.

    Args:
        ranks: indices of the ranks to keep.

    Raises:
        ValueError: If the sub-network is not connected, or if the bandwidth into a node differs
            from the bandwidth out of the node.
    """
    kept = tuple(network.ranks[rank] for rank in ranks)
    if kept == network.ranks:
        return network
    nodes = {*kept, *network.switches}
    wires = [w for w in network.wires if w.source in nodes and w.target in nodes]
    reached = _reached(wires, kept[0])
    return Network(f"{network.name}, {len(kept)} of {len(network.ranks)} ranks", kept,
                   tuple(s for s in network.switches if s in reached),
                   tuple(w for w in wires if w.source in reached or w.source in kept))


def shortest_paths(network: Network, node: str) -> dict[str, tuple[str, ...]]:
    """For each target node, return a path from the given node that uses as few wires as possible.

    Among equally short paths, wires that are listed earlier in the network are preferred.
    """
    after: dict[str, list[str]] = {name: [] for name in network.nodes}
    for wire in network.wires:
        after[wire.source].append(wire.target)
    paths: dict[str, tuple[str, ...]] = {node: (node,)}
    border = deque([node])
    while border:
        current = border.popleft()
        for neighbour in after[current]:
            if neighbour not in paths:
                paths[neighbour] = (*paths[current], neighbour)
                border.append(neighbour)
    return paths


def parse_fraction(value: Any, where: str) -> Fraction:
    """Convert an integer, a float, or a string such as "25/2" to an exact fraction.

    Raises:
        ValueError: If the value is not a number, or if it has too many digits.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        text = repr(value) if abs(value) < 10**15 else ""
        if "e" in text or (isinstance(value, float) and len(text) > 14):
            return Fraction(value).limit_denominator(10**9)
    else:
        text = value.strip() if isinstance(value, str) else ""
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{where} is {short(value)}; write a number such as 25, 12.5 or 25/2")
    above, _, below = text.partition("/")
    if below and not int(below):
        raise ValueError(f"{where} is {short(value)}, a division by 0; correct the number")
    return Fraction(above) / int(below or 1)


def _rate(cluster: Cluster, name: str) -> Fraction:
    link: Link = getattr(cluster, name)
    if not link.beta_s:
        raise ValueError(f"cluster {short(cluster.name)}: {name}.beta_s=0 means infinite "
                         "bandwidth. Calibrate the cluster or write the seconds per byte")
    return Fraction(f"{1e-9 / link.beta_s:.{_DIGITS - 1}e}")


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where} is {short(value)}, but it must be a list")
    return value


def _names(value: Any, where: str, prefix: str) -> tuple[str, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= MAX_NODES:
            raise ValueError(f"{where} is {short(value)}; write a number from 0 to {MAX_NODES}")
        return tuple(f"{prefix}{index}" for index in range(value))
    return tuple(_name(each, f"{where}[{i}]") for i, each in enumerate(_list(value, where)))


def _name(value: Any, where: str) -> str:
    if not isinstance(value, (str, int)) or isinstance(value, bool) or value == "":
        raise ValueError(f"{where} is {short(value)}; write the name of a node")
    return str(value)


def _wire(link: Any, where: str) -> Wire:
    if len(_list(link, where)) not in (3, 4):
        raise ValueError(f"{where} is {short(link)}; write [a, b, GB/s] or [a, b, GB/s, alpha_s]")
    alpha_s = link[3] if len(link) == 4 else 0.0
    if not isinstance(alpha_s, (int, float)) or isinstance(alpha_s, bool):
        raise ValueError(f"{where}: alpha_s is {short(alpha_s)}; write the seconds of each message")
    return Wire(_name(link[0], where), _name(link[1], where),
                parse_fraction(link[2], f"{where}: bandwidth"), alpha_s)


def _check_wires(network: Network, where: str) -> None:
    nodes, seen = set(network.nodes), set()
    for wire in network.wires:
        which = f"{where}: wire {short(wire.source)} to {short(wire.target)}"
        for end in wire.ends:
            if end not in nodes:
                raise ValueError(f"{which}: {short(end)} is neither a rank nor a switch. Add the "
                                 "node or correct the name")
        if wire.source == wire.target:
            raise ValueError(f"{which} connects a node with itself; remove it")
        if not SLOWEST <= wire.bandwidth <= FASTEST:
            raise ValueError(f"{which}: bandwidth {short(wire.bandwidth)} GB/s must be from "
                             f"{float(SLOWEST):g} to {float(FASTEST):g}. Correct the bandwidth or "
                             "remove the wire")
        if not 0 <= wire.alpha_s <= 1e9:
            raise ValueError(f"{which}: alpha_s {short(wire.alpha_s)} must be seconds from 0 to "
                             "1e9; correct the value")
        if wire.ends in seen:
            raise ValueError(f"{which} is listed twice. Specify a single wire whose bandwidth "
                             "is the sum of the two")
        seen.add(wire.ends)


def _check_balance(network: Network, where: str) -> None:
    leaving: dict[str, Fraction] = defaultdict(Fraction)
    entering: dict[str, Fraction] = defaultdict(Fraction)
    for wire in network.wires:
        leaving[wire.source] += wire.bandwidth
        entering[wire.target] += wire.bandwidth
    for node in network.nodes:
        if leaving[node] != entering[node]:
            raise ValueError(
                f"{where}: node {short(node)} receives {entering[node]} GB/s but sends "
                f"{leaving[node]} GB/s. Both must be equal; correct its wires")


def _check_connected(network: Network, where: str) -> None:
    # if each node sends as much as it receives, a path in one direction implies a path back
    first = network.nodes[0]
    reached = _reached(network.wires, first)
    for node in network.nodes:
        if node not in reached:
            raise ValueError(f"{where}: no path connects {short(first)} with {short(node)}. Add "
                             "wires or remove the node")


def _reached(wires: Iterable[Wire], first: str) -> set[str]:
    """Return all nodes that can be reached from the node `first`, including this node."""
    neighbours: dict[str, list[str]] = defaultdict(list)
    for wire in wires:
        neighbours[wire.source].append(wire.target)
    reached, border = {first}, [first]
    while border:
        fresh = set(neighbours[border.pop()]) - reached
        reached |= fresh
        border.extend(fresh)
    return reached
