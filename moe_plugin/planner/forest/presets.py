"""Networks by name: `ring:8`, `torus:4x4x4`, `dgx-a100:2`; each is made by one function.

Bandwidths are GB/s in one direction, as the makers publish them; latencies are left at zero, since
they are not published (a network's file can state them). Sources: NVIDIA DGX A100, DGX H100 and DGX
GB200 user guides; AMD Instinct MI250 in the ROCm documentation; for graphs, their definitions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import product
from math import prod

from moe_plugin.planner.forest.network import Network, Wire
from moe_plugin.utils.messages import short

MAX_NODES = 8192
# GB/s in one direction
XGMI = 50  # one Infinity Fabric link: 16 lanes of 25 GT/s
NIC_MI250 = 16  # per GCD, the value of ForestColl's published evaluation
# Between the 16 GCDs of eight MI250, by numbers in the node: links of XGMI each. GCDs 2i and 2i + 1
# share a package. The node is two equal halves of eight GCDs, joined by six links.
PACKAGE_LINKS = 4
HALF_LINKS = ((0, 4, 2), (3, 7, 2), (1, 5, 1), (2, 6, 1), (4, 6, 1), (5, 6, 1), (5, 7, 1))
JOINING_LINKS = ((0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 3))  # of each half, by number in it


@dataclass
class Builder:
    """A network under construction: nodes in order, bandwidths by the two ends of a wire."""

    ranks: list[str] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)
    wires: dict[tuple[str, str], Fraction] = field(default_factory=dict)

    def rank(self, name: str) -> str:
        """Add a compute node; returns its name."""
        self.ranks.append(name)
        return name

    def switch(self, name: str) -> str:
        """Add a switch; returns its name."""
        self.switches.append(name)
        return name

    def link(self, a: str, b: str, bandwidth: Fraction | int) -> None:
        """Add wires of `bandwidth` GB/s in both directions; parallel links add up."""
        for ends in ((a, b), (b, a)):
            self.wires[ends] = self.wires.get(ends, Fraction(0)) + bandwidth

    def network(self, name: str) -> Network:
        """The finished network."""
        return Network(name=name, ranks=tuple(self.ranks), switches=tuple(self.switches),
                       wires=tuple(Wire(*ends, rate) for ends, rate in self.wires.items()))


# -- graphs: into a builder, with the GB/s of a link of weight 1


def star(b: Builder, scale: Fraction, ranks: int) -> None:
    """All ranks at one switch."""
    switch = b.switch("switch")
    for i in range(ranks):
        b.link(b.rank(f"r{i}"), switch, scale)


def clusters(b: Builder, scale: Fraction, count: int, size: int) -> None:
    """Clusters with a switch each (10 per rank), and one switch for all (1 per rank)."""
    everyone = b.switch("global")
    for c in range(count):
        switch = b.switch(f"c{c}.switch")
        for i in range(size):
            rank = b.rank(f"c{c}.r{i}")
            b.link(rank, switch, 10 * scale)
            b.link(rank, everyone, scale)


def mesh(b: Builder, scale: Fraction, *sizes: int, wraps: bool = False) -> None:
    """A grid of any number of dimensions, linked to the neighbours in each.

    wraps: its ends are linked, too: a torus; a dimension of 2 has one link, not two.
    """
    names = {at: b.rank("r" + ".".join(map(str, at))) for at in product(*map(range, sizes))}
    for at, here in names.items():
        for axis, size in enumerate(sizes):
            following = at[axis] + 1
            if following < size or (wraps and size > 2):
                there = (*at[:axis], following % size, *at[axis + 1 :])
                b.link(here, names[there], scale)


def hypercube(b: Builder, scale: Fraction, dimensions: int) -> None:
    """2 to the power of `dimensions` ranks; linked are those that differ in one bit."""
    mesh(b, scale, *(2,) * dimensions)


def fat_tree(b: Builder, scale: Fraction, ports: int) -> None:
    """The three-level fat tree of switches with an even number of ports (Al-Fares et al., 2008):
    ports ** 3 / 4 ranks, full bisection bandwidth.

    Raises: ValueError: an odd number of ports.
    """
    if ports % 2:
        raise ValueError(f"fat-tree:{ports}: a fat tree's switches have an even number of ports; "
                         f"use {ports + 1}")
    half = ports // 2
    cores = [[b.switch(f"core{i}.{j}") for j in range(half)] for i in range(half)]
    for pod in range(ports):
        upper = [b.switch(f"p{pod}.up{i}") for i in range(half)]
        for i, switch in enumerate(upper):
            for core in cores[i]:
                b.link(switch, core, scale)
        for e in range(half):
            edge = b.switch(f"p{pod}.edge{e}")
            for switch in upper:
                b.link(edge, switch, scale)
            for h in range(half):
                b.link(b.rank(f"p{pod}.{e}.{h}"), edge, scale)


def dragonfly(b: Builder, scale: Fraction, routers: int, hosts: int, links: int) -> None:
    """Groups of `routers`, linked with each other, with `hosts` ranks and `links` links to other
    groups each; every two of the routers * links + 1 groups share a link (Kim et al., 2008).
    """
    groups = routers * links + 1
    names = [[b.switch(f"g{g}.s{r}") for r in range(routers)] for g in range(groups)]
    for g in range(groups):
        for r in range(routers):
            for h in range(hosts):
                b.link(b.rank(f"g{g}.{r}.{h}"), names[g][r], scale)
            for other in range(r + 1, routers):
                b.link(names[g][r], names[g][other], scale)
        for other in range(g + 1, groups):
            # port p of group g leads to group g + 1 + p
            here, there = other - g - 1, g - other - 1 + groups
            b.link(names[g][here // links], names[other][there // links], scale)


# -- machines


def switched(b: Builder, scale: Fraction, nodes: int, *, size: int, inner: int,
             outer: int) -> None:
    """Nodes of `size` GPUs at a switch (`inner` GB/s each); several nodes share a network without
    a bottleneck of its own, which every GPU reaches through a card (`outer` GB/s).
    """
    fabric = b.switch("network") if nodes > 1 else ""
    for n in range(nodes):
        switch = b.switch(f"n{n}.nvswitch")
        for g in range(size):
            rank = b.rank(f"n{n}.gpu{g}")
            b.link(rank, switch, inner * scale)
            if fabric:
                b.link(rank, fabric, outer * scale)


def mi250(b: Builder, scale: Fraction, nodes: int) -> None:
    """Nodes of eight AMD MI250 (16 GCDs, seven Infinity Fabric links of 50 GB/s each); 16 GB/s per
    GCD between nodes.
    """
    fabric = b.switch("network") if nodes > 1 else ""
    for n in range(nodes):
        gcds = [b.rank(f"n{n}.gcd{g}") for g in range(16)]
        for package in range(8):
            b.link(gcds[2 * package], gcds[2 * package + 1], PACKAGE_LINKS * XGMI * scale)
        for first in (0, 8):
            for i, j, count in HALF_LINKS:
                b.link(gcds[first + i], gcds[first + j], count * XGMI * scale)
        for i, j in JOINING_LINKS:
            b.link(gcds[i], gcds[8 + j], XGMI * scale)
        if fabric:
            for gcd in gcds:
                b.link(gcd, fabric, NIC_MI250 * scale)


# -- by name


@dataclass(frozen=True)
class Preset:
    """A network by name.

    Attributes:
        make: called with a builder, the GB/s of a link of weight 1, and the numbers after the
            colon.
        numbers: what they are.
        count: of them; None: any.
        example: as users write it.
        ranks: how many ranks the numbers make, so that nothing is built that is too large.
        least: of each number.
    """

    make: Callable[..., None]
    numbers: str
    count: int | None
    example: str
    ranks: Callable[..., int]
    least: int = 1


def _machine(example: str, size: int, inner: int, outer: int, numbers: str) -> Preset:
    return Preset(partial(switched, size=size, inner=inner, outer=outer), numbers, 1, example,
                  lambda n: size * n)


TORUS = partial(mesh, wraps=True)
PRESETS = {
    "ring": Preset(TORUS, "the number of ranks", 1, "ring:8", lambda n: n, least=2),
    "star": Preset(star, "the number of ranks", 1, "star:8", lambda n: n),
    "clusters": Preset(clusters, "clusters x ranks of each", 2, "clusters:2x4",
                       lambda c, n: c * n),
    "mesh": Preset(mesh, "its size in each dimension", None, "mesh:3x3", lambda *n: prod(n)),
    "torus": Preset(TORUS, "its size in each dimension", None, "torus:4x4x4", lambda *n: prod(n)),
    "hypercube": Preset(hypercube, "the number of dimensions", 1, "hypercube:3",
                        lambda d: 1 << min(d, 64)),
    "fat-tree": Preset(fat_tree, "the number of ports of a switch", 1, "fat-tree:4",
                       lambda p: p**3 // 4, least=2),
    "dragonfly": Preset(dragonfly, "routers of a group x ranks and links of a router", 3,
                        "dragonfly:2x2x1", lambda a, p, h: a * p * (a * h + 1)),
    # 12 NVLink 3 of 25 GB/s per GPU, HDR InfiniBand (200 Gbit/s)
    "dgx-a100": _machine("dgx-a100:2", 8, 300, 25, "the number of nodes"),
    # 18 NVLink 4 of 25 GB/s per GPU, NDR (400 Gbit/s)
    "dgx-h100": _machine("dgx-h100:2", 8, 450, 50, "the number of nodes"),
    # 18 NVLink 5 of 50 GB/s per GPU, NDR
    "gb200-nvl72": _machine("gb200-nvl72:1", 72, 900, 50, "the number of racks"),
    "mi250": Preset(mi250, "the number of nodes", 1, "mi250:2", lambda n: 16 * n),
}


def preset(text: str) -> Network:
    """The network of a name such as `dgx-a100:2` or `torus:4x4@25` (links of 25 GB/s, not 1).

    Of a machine, `@` multiplies all of its links.

    Raises: ValueError: an unknown name, wrong numbers, or a network that is too large.
    """
    match = re.fullmatch(r"([a-z0-9-]+?)(?::([0-9]{1,9}(?:x[0-9]{1,9})*))?"
                         r"(?:@([0-9]{1,9}(?:\.[0-9]{1,9})?))?", text.strip())
    kind = PRESETS.get(match[1]) if match else None
    if match is None or kind is None:
        raise ValueError(f"{short(text)} is neither a file nor a preset; presets: "
                         f"{', '.join(known.example for known in PRESETS.values())}")
    sizes = [int(word) for word in (match[2] or "1").split("x")]
    if len(sizes) != (kind.count or len(sizes)) or min(sizes) < kind.least:
        raise ValueError(f"{short(text)}: after {match[1]}: comes {kind.numbers}, at least "
                         f"{kind.least}, such as {kind.example}")
    ranks, scale = kind.ranks(*sizes), Fraction(match[3] or 1)
    if not 1 <= ranks <= MAX_NODES:
        raise ValueError(f"{short(text)} would be a network of {short(ranks)} ranks; must be from "
                         f"1 to {MAX_NODES}")
    if scale == 0:
        raise ValueError(f"{short(text)}: a bandwidth (after @) must be > 0; leave it out for 1")
    builder = Builder()
    kind.make(builder, scale, *sizes)
    return builder.network(f"{match[1]}:{'x'.join(map(str, sizes))}"
                           + (f"@{match[3]}" if scale != 1 else ""))
