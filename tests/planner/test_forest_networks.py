"""Networks by name, of `nvidia-smi topo -m`, of files: their wires, and what is refused."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.cluster import Cluster, Link, dump_cluster
from moe_plugin.planner.forest import Network
from moe_plugin.planner.forest.presets import PRESETS, preset
from moe_plugin.planner.forest.source import find_network, network_of, parse_table

pytestmark = pytest.mark.fast

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

SWITCHED = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tNV12\tPXB\tNODE\tSYS\t48-63\t3\t\tN/A
GPU1\tNV12\t X \tNV12\tSYS\tPXB\tSYS\t48-63\t3\t\tN/A
GPU2\tNV12\tNV12\t X \tSYS\tSYS\tPIX\t16-31\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\t X \tNODE\tSYS
NIC1\tNODE\tPXB\tSYS\tNODE\t X \tSYS
NIC2\tSYS\tSYS\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
BRIDGED = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV4     SYS     SYS     0-7     0
GPU1    NV4      X      SYS     SYS     0-7     0
GPU2    SYS     SYS      X      PHB     8-15    1
GPU3    SYS     SYS     PHB      X      8-15    1
"""


def rates(network: Network) -> dict[tuple[str, str], Fraction]:
    return {wire.ends: wire.bandwidth for wire in network.wires}


@pytest.mark.parametrize("name, ranks, switches, links", [
    ("ring:2", 2, 0, 1), ("ring:8", 8, 0, 8), ("star:8", 8, 1, 8), ("clusters:2x4", 8, 3, 16),
    ("mesh:2x3", 6, 0, 7), ("mesh:3x3", 9, 0, 12), ("torus:3x3", 9, 0, 18),
    ("torus:4x4x4", 64, 0, 192), ("torus:2x3", 6, 0, 9), ("hypercube:3", 8, 0, 12),
    ("fat-tree:4", 16, 20, 48), ("dragonfly:2x2x1", 12, 6, 18), ("dragonfly:4x2x2", 72, 36, 162),
    ("dgx-a100", 8, 1, 8), ("dgx-a100:2", 16, 3, 32), ("dgx-h100:4", 32, 5, 64),
    ("gb200-nvl72:1", 72, 1, 72), ("mi250:1", 16, 0, 28), ("mi250:2", 32, 1, 88),
])
def test_presets_have_their_sizes(name: str, ranks: int, switches: int, links: int) -> None:
    made = preset(name)
    assert (len(made.ranks), len(made.switches), len(made.wires)) == (ranks, switches, 2 * links)
    assert made.name in (name, f"{name}:1")


def test_presets_have_their_bandwidths() -> None:
    for name, egress in [("mi250:1", 7 * 50), ("mi250:2", 366), ("dgx-a100:2", 325),
                         ("dgx-h100:2", 500), ("gb200-nvl72:2", 950), ("torus:3x3@12.5", 50)]:
        made = preset(name)
        sums = Counter()
        for wire in made.wires:
            sums[wire.source] += wire.bandwidth
        assert {sums[rank] for rank in made.ranks} == {egress}, name
    assert rates(preset("mi250:1"))["n0.gcd0", "n0.gcd4"] == 100
    assert set(rates(preset("ring:3@12.5")).values()) == {Fraction(25, 2)}


def test_every_two_groups_of_a_dragonfly_share_one_link() -> None:
    made = preset("dragonfly:3x1x2")
    between = Counter(tuple(sorted(end.split(".")[0] for end in wire.ends)) for wire in made.wires)
    assert {count for (a, b), count in between.items() if a != b} == {2}
    ports = Counter(wire.source for wire in made.wires)
    assert {ports[switch] for switch in made.switches} == {1 + 2 + 2}


@pytest.mark.parametrize("name, said", [
    ("dgx-b300:2", "nor a preset. Available presets: ring:8"), ("ring:1", "at least 2"),
    ("ring:3x3", "the number of ranks"), ("clusters:8", "clusters x ranks"),
    ("fat-tree:5", "even number of ports. Use 6"), ("torus:0x3", "at least 1"),
    ("hypercube:99", "from 1 to 8192"), ("torus:999999999x999999999", "from 1 to 8192"),
    ("dgx-a100:2@0", "must be > 0"), ("ring:8@-3", "neither a file"), ("", "neither a file"),
])
def test_wrong_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        preset(name)


def test_each_preset_has_an_example_that_works() -> None:
    for name, kind in PRESETS.items():
        assert preset(kind.example).name == kind.example and kind.example.startswith(name)
        assert kind.make.__doc__


def test_nvlinks_by_a_switch() -> None:
    table = parse_table(SWITCHED, "table")
    assert table.gpus == ("GPU0", "GPU1", "GPU2") and table.cards == ("NIC0", "NIC1", "NIC2")
    one = network_of(table)
    assert one.ranks == table.gpus and rates(one) == {
        ends: 300 for gpu in table.gpus for ends in ((gpu, "nvswitch0"), ("nvswitch0", gpu))}
    two = rates(network_of(table, nodes=2))
    assert two["n1.GPU0", "n1.NIC0"] == two["n1.NIC0", "network"] == 25
    assert ("n0.GPU0", "n0.NIC1") not in two, "a card serves the GPUs nearest to it"


def test_nvlinks_between_pairs_and_pcie_between_the_others() -> None:
    found = rates(network_of(parse_table(BRIDGED, "table")))
    assert found["GPU0", "GPU1"] == 100 and ("GPU0", "GPU2") not in found
    phb, = {b for a, b in found if a == "GPU3" and b.startswith("phb")}
    top, = {b for a, b in found if a == phb and b.startswith("sys")}
    assert found["GPU2", phb] == 25 and found[phb, top] == 20 == found["GPU0", top]


@pytest.mark.parametrize("change, said", [
    (("GPU1\tNV12", "GPU1\tNV13"), "GPU0 to GPU1 is NV12, but the reverse is NV13"),
    (("PXB\tNODE\tSYS\t48", "PXB\tNODE\tFAR\t48"), "from GPU0 to NIC2 has the unknown class 'FAR'"),
    (("NIC2\tSYS\tSYS\tPIX\tSYS\tSYS\t X", "other"), "not the row of a device"),
    (("GPU2\tNV12", "GPU1\tNV12"), "from GPU1 to GPU1 has the unknown class 'NV12'"),
    (("\tGPU1\tGPU2\tNIC0", "\tGPU1\tGPU1\tNIC0"), "a device twice"),
    (("\tGPU0\tGPU1", "\tGPUs"), "has no header line with GPU0"),
])
def test_a_damaged_table_is_refused(change: tuple[str, str], said: str) -> None:
    assert change[0] in SWITCHED
    with pytest.raises(ValueError, match=said) as error:
        parse_table(SWITCHED.replace(*change, 1), "topology 'x'")
    assert "topology 'x'" in str(error.value) and "nvidia-smi topo -m" in str(error.value)


@given(st.sampled_from((SWITCHED, BRIDGED)), st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_other_table_is_read_or_refused(text: str, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 12)))
    words = st.sampled_from(("X", "NV1", "SYS", "GPU1", "NIC0", "\t", "\n", "", "\x1b[0m", "NV99"))
    changed = text[:begin] + data.draw(st.text(max_size=3) | words) + text[end:]
    try:
        made = network_of(parse_table(changed, "table"), data.draw(st.integers(1, 3)))
    except ValueError as error:
        remedies = ("provide ", "write ", "add ")
        assert any(word in str(error).lower() for word in remedies), error
    else:
        assert made.ranks


def test_a_network_of_each_kind_of_file(tmp_path: Path) -> None:
    table, cluster = tmp_path / "topo.txt", tmp_path / "cluster.yaml"
    table.write_text(BRIDGED)
    cluster.write_text(dump_cluster(Cluster(nodes=2, ranks_per_node=2, nics=2, name="two",
                                            intra=Link(beta_s=1e-11), inter=Link(beta_s=1e-10))))
    found, note = find_network(str(table))
    assert len(found.ranks) == 4 and found.name == "topo" and "25 per NVLink" in note
    found, note = find_network(str(cluster), nodes=3)
    assert (len(found.ranks), found.name, note) == (6, "two", "")
    for path in sorted((CONFIGS / "networks").iterdir()):
        assert find_network(str(path))[0].name == path.stem
    for path in sorted((CONFIGS / "clusters").iterdir()):
        if path.stem != "emulated":  # its ranks talk through memory: no bandwidth to plan with
            assert find_network(str(path), nodes=2)[0].ranks
    assert find_network("ring:4")[0] == preset("ring:4")


def refused(path: Path, content: str, said: str, nodes: int | None = None) -> None:
    path.write_text(content)
    with pytest.raises(ValueError, match=said) as error:
        find_network(str(path), nodes)
    assert path.name in str(error.value)


def test_what_is_no_network_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    refused(path, "ranks: 2\nlinks: [[a, b, 1]]", "neither a rank nor a switch")
    refused(path, "ranks: [a, b, a]\nlinks: [[a, b, 1]]", "'a' is listed twice")
    refused(path, "ranks: [a, b]\nlinks: [[a, b, 0]]", "bandwidth")
    refused(path, "ranks: [a, b]\nlinks: [[a, b, -3]]", "-3; write a number")
    refused(path, "ranks: [a, b]\none_way: [[a, b, 2], [b, a, 1]]", "Both must be equal")
    refused(path, "ranks: [a, b, c]\nlinks: [[a, b, 2]]", "no path connects 'a' with 'c'")
    refused(path, "- a\n- b\n", "contains a list")
    refused(path, "\x00\x01", "is not YAML")
    refused(path, "ranks: 2\nlinks: [['0', '1', 1]]", "add the nodes to the file", nodes=2)
    refused(path, SWITCHED.replace("\tNIC0\tNIC1\tNIC2", "").replace("NIC", "#"),
            "lists no network cards", nodes=2)
    refused(path, "nodes: 0\n", "nodes=0 must be from 1")
    with pytest.raises(ValueError, match="no such file"):
        find_network(str(tmp_path / "missing.yaml"))
    with pytest.raises(ValueError, match="is a folder"):
        find_network(str(tmp_path))
    with pytest.raises(ValueError, match="after its colon"):
        find_network("ring:4", nodes=2)
    with pytest.raises(ValueError, match="at least 1"):
        find_network("ring:4", nodes=0)
