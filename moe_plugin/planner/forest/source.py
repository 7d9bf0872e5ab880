"""Load networks from a preset name or from one of three types of files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from moe_plugin.planner.cluster import load_cluster
from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.presets import Builder, preset
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input
from moe_plugin.utils.yaml_file import bundled, read_yaml

# Networks of a machine from the output of `nvidia-smi topo -m`.
#
# The table contains classes instead of speeds, so each class has an assumed speed (`Speeds`). There
# are two kinds of connections: NVLinks, with their number, and PCIe, with the components in between
# (PIX: one switch, PXB: several switches, PHB: a host bridge, NODE: several host bridges in a NUMA
# node, SYS: between sockets).
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
OLD_NAMES = {"SOC": "SYS"}
# Maximum of any GPU so far. A row with more NVLinks lists the same links several times, because the
# links lead to a switch.
MOST_NVLINKS = 18
MAX_DEVICES = 512
_REMEDY = "provide the unchanged output of `nvidia-smi topo -m`"
_CELL = re.compile(r"X|NV[1-9][0-9]?|PIX|PXB|PHB|NODE|SYS|SOC")
_TERMINAL = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the head of the table
# the head of the table, but no row of a device, where X follows GPU0
_HEAD = re.compile(r"\s*GPU0(?!\s+X(\s|$))(\s|$)")


@dataclass(frozen=True)
class Speeds:
    """Assumed bandwidths in GB/s per direction.

    Attributes:
        nvlink: bandwidth of one NVLink (25 GB/s from Volta to Hopper, 50 GB/s on Blackwell).
        pcie: bandwidth of the PCIe connection of a GPU, network card or switch. Defaults to the
            bandwidth that PCIe 4.0 x16 reaches in practice.
        sockets: bandwidth of the connection between two CPU sockets.
        card: bandwidth of a network card. Defaults to 200 Gbit/s.
    """

    nvlink: Fraction = Fraction(25)
    pcie: Fraction = Fraction(25)
    sockets: Fraction = Fraction(20)
    card: Fraction = Fraction(25)

    def __str__(self) -> str:
        return (f"assumed GB/s in one direction: {self.nvlink} per NVLink, {self.pcie} for PCIe, "
                f"{self.sockets} between sockets, {self.card} per network card")


@dataclass(frozen=True)
class TopologyTable:
    """The connections listed in the table that `nvidia-smi topo -m` prints.

    Attributes:
        gpus, cards: names of the GPUs and of the network cards, in the order of the table.
        classes: for each ordered pair of names, the class of the connection, such as `NV4`.
    """

    gpus: tuple[str, ...]
    cards: tuple[str, ...]
    classes: Mapping[tuple[str, str], str]

    def links(self, a: str, b: str) -> int:
        """Return the number of NVLinks between two GPUs. Return 0 if the GPUs are connected only by
        PCIe.
        """
        connection = self.classes[a, b]
        return int(connection[2:]) if connection.startswith("NV") else 0


def is_table(text: str) -> bool:
    """Return True if a string looks like the output of `nvidia-smi topo -m`."""
    return any(_HEAD.match(line) for line in _TERMINAL.sub("", text).splitlines())


def parse_table(text: str, where: str) -> TopologyTable:
    """Read the table. CPU affinities and the legend below the table are ignored.

    Args:
        text: output of `nvidia-smi topo -m`.
        where: source of the text for error messages, such as the path of the file.

    Raises:
        ValueError: If a row or cell is missing or cannot be interpreted, or if a connection has
            different classes in the two directions.
    """
    lines = _TERMINAL.sub("", text).splitlines()
    first = next((i for i, line in enumerate(lines) if _HEAD.match(line)), None)
    if first is None:
        raise ValueError(f"{where} has no header line with GPU0, GPU1, ...; {_REMEDY}")
    # the columns after the devices have names of several words, e.g. "CPU Affinity"
    names = re.split(r"\s+(?:CPU|NUMA|GPU) ", lines[first])[0].split()
    if len(names) > MAX_DEVICES or len(set(names)) != len(names):
        raise ValueError(f"{where}: the header lists a device twice or more than {MAX_DEVICES} "
                         f"devices; {_REMEDY}")
    classes = {}
    for line in lines[first + 1 : first + 1 + len(names)]:
        words = line.split()
        row, cells = words[0] if words else "", words[1 : 1 + len(names)]
        if row not in names or len(cells) != len(names):
            raise ValueError(f"{where}: {short(line)} is not the row of a device with "
                             f"{len(names)} cells; {_REMEDY}")
        for column, cell in zip(names, cells, strict=True):
            if not _CELL.fullmatch(cell) or (cell == "X") != (row == column):
                raise ValueError(f"{where}: the connection from {row} to {column} has the unknown "
                                 f"class {short(cell)}; {_REMEDY}")
            classes[row, column] = OLD_NAMES.get(cell, cell)
    for a, b in ((a, b) for a in names for b in names):
        if classes.get((a, b)) != classes.get((b, a)) or (a, b) not in classes:
            raise ValueError(f"{where}: {a} to {b} is {classes.get((a, b), 'missing')}, but the "
                             f"reverse is {classes.get((b, a), 'missing')}; {_REMEDY}")
    gpus = tuple(name for name in names if name.startswith("GPU"))
    return TopologyTable(gpus, tuple(name for name in names if name not in gpus), classes)


def network_of(table: TopologyTable, nodes: int = 1, speeds: Speeds = Speeds(),
               name: str = "machine") -> Network:
    """Return the network of `nodes` identical machines that are connected by their network cards.

    NVLinks are assumed to connect GPUs directly, unless the table lists more NVLinks than a GPU
    has. If the table lists more NVLinks, the NVLinks are assumed to lead to a switch. GPUs exchange
    data over PCIe only if NVLinks do not connect all GPUs. Each network card is used by the GPUs
    that are nearest to it. All network cards are connected by a network without a bottleneck.

    Args:
        table: connections between the devices of one machine.
        nodes: number of machines. Defaults to 1.
        speeds: assumed bandwidths.

    Raises:
        ValueError: If there are several machines but no network cards.
    """
    if nodes > 1 and not table.cards:
        raise ValueError(f"{name} lists no network cards, so {nodes} nodes cannot be "
                         "connected. Plan for a single node, or write a network file "
                         "(configs/networks/)")
    b = Builder()
    fabric = b.switch("network") if nodes > 1 else ""
    for node in range(nodes):
        prefix = f"n{node}." if nodes > 1 else ""
        for gpu in table.gpus:
            b.rank(prefix + gpu)
        islands = _groups(table.gpus, lambda x, y: table.links(x, y) > 0)
        for index, island in enumerate(islands):
            _add_nvlinks(b, table, island, prefix, index, speeds)
        if len(islands) > 1:
            _add_pcie(b, table, prefix, speeds)
        for card in table.cards if fabric else ():
            box = b.switch(prefix + card)
            b.link(box, fabric, speeds.card)
            for gpu in _nearest(table, card):
                b.link(prefix + gpu, box, speeds.card)
    return b.network(name)


def _add_nvlinks(b: Builder, table: TopologyTable, island: Sequence[str], prefix: str, index: int,
                 speeds: Speeds) -> None:
    links = {(x, y): table.links(x, y) for x in island for y in island if x != y}
    most = {x: sum(links[x, y] for y in island if y != x) for x in island}
    if max(most.values()) <= MOST_NVLINKS:
        for x, y in ((x, y) for x, y in links if x < y and links[x, y]):
            b.link(prefix + x, prefix + y, links[x, y] * speeds.nvlink)
        return
    switch = b.switch(f"{prefix}nvswitch{index}")
    for x in island:
        b.link(prefix + x, switch, max(links[x, y] for y in island if y != x) * speeds.nvlink)


def _add_pcie(b: Builder, table: TopologyTable, prefix: str, speeds: Speeds) -> None:
    """Add a tree of PCIe switches. GPUs in the nearest connection class are joined first."""
    top = {gpu: prefix + gpu for gpu in table.gpus}  # highest node above each GPU so far
    for level, name in enumerate(LEVELS):
        near = LEVELS[: level + 1]
        for index, group in enumerate(
                _groups(table.gpus, lambda x, y: top[x] == top[y] or table.classes[x, y] in near)):
            below = list(dict.fromkeys(top[gpu] for gpu in group))
            if len(below) == 1:
                continue
            switch = b.switch(f"{prefix}{name.lower()}{index}")
            for child in below:
                b.link(child, switch, speeds.sockets if name == "SYS" else speeds.pcie)
            top.update(dict.fromkeys(group, switch))


def _nearest(table: TopologyTable, card: str) -> list[str]:
    distance = {gpu: LEVELS.index(table.classes[card, gpu]) for gpu in table.gpus
                if table.classes[card, gpu] in LEVELS}
    return [gpu for gpu, far in distance.items() if far == min(distance.values())]


def _groups(names: Sequence[str], joined: Callable[[str, str], bool]) -> list[list[str]]:
    """Return groups of names that are directly or indirectly connected, in the order of the names.
    joined: function that returns whether two names are connected directly.
    """
    left, groups = list(names), []
    while left:
        group = [left.pop(0)]
        for member in group:
            near = [other for other in left if joined(member, other)]
            group += near
            left = [other for other in left if other not in near]
        groups.append(sorted(group, key=names.index))
    return groups


KINDS = ("a network file (configs/networks/), a cluster file (`moe-plugin calibrate`), the output "
         "of `nvidia-smi topo -m`, or a preset such as dgx-a100:2")
MAX_BYTES, MAX_RANKS = 4_000_000, 1 << 13
_CLUSTER_KEYS = {"nodes", "ranks_per_node", "nics", "intra", "inter"}


def find_network(text: str, nodes: int | None = None) -> tuple[Network, str]:
    """Return the network that a user specified, and a line that lists the assumed bandwidths. The
    line is empty if no bandwidths were assumed.

    Args:
        text: path of a file or name of a preset. If a file and a preset have the same name, the
            file is used.
        nodes: number of machines. Only allowed for a cluster file or for the output of
            `nvidia-smi`. Defaults to the number in the file, or to 1 if the file does not contain a
            number of machines.

    Raises:
        ValueError: If `text` is neither a file nor a preset, if the file does not describe a
            network, or if `nodes` is given although the number of machines is already fixed.
    """
    path = Path(bundled(text))
    if nodes is not None and nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1; omit it to use the number in the file")
    if not path.exists():
        if len(path.parts) > 1 or path.suffix in (".yaml", ".yml", ".txt", ".json"):
            raise ValueError(f"topology {short(text)} cannot be read (no such file); provide "
                             f"{KINDS}")
        _without_nodes(text, nodes, "write the number after its colon")
        return preset(text), ""
    check_input(path, "topology", f"provide {KINDS}")
    try:
        with open(path, "rb") as stream:
            content = stream.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(f"topology {short(text)} cannot be read ({error.strerror}); provide "
                         f"{KINDS}") from error
    try:
        return _read(path, content, nodes)
    except ValueError as error:  # the message may name the network instead of the file
        raise ValueError(error if short(text) in str(error)
                         else f"topology {short(text)}: {error}") from error


def _read(path: Path, content: str, nodes: int | None) -> tuple[Network, str]:
    if is_table(content):
        speeds = Speeds()
        table = parse_table(content, "the table")
        _check_size(len(table.gpus) * (nodes or 1))
        return network_of(table, nodes or 1, speeds, path.stem), str(speeds)
    values = read_yaml(path, "topology", f"provide {KINDS}")
    if _CLUSTER_KEYS & set(values):
        cluster = load_cluster(path)
        cluster = cluster.resized(nodes or cluster.nodes)
        _check_size(cluster.ranks)
        return Network.from_cluster(cluster), ""
    _without_nodes(path.name, nodes, "add the nodes to the file")
    return Network.from_dict({"name": path.stem, **values}), ""


def _without_nodes(text: str, nodes: int | None, remedy: str) -> None:
    if nodes is not None:
        raise ValueError(f"nodes={nodes} cannot be set for {short(text)}, which defines its own "
                         f"size; {remedy}")


def _check_size(ranks: int) -> None:
    if ranks > MAX_RANKS:
        raise ValueError(f"{ranks} ranks are more than the limit of {MAX_RANKS}; use fewer nodes")
