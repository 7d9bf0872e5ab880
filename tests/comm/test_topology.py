"""Which ranks share a node."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from moe_plugin.comm import LocalComm, Topology, algorithms, run_simulated
from moe_plugin.comm.by_nodes import _Rows
from moe_plugin.comm.state import MAX_TAG, GroupState
from moe_plugin.comm.topology import node_key, node_name

pytestmark = pytest.mark.fast

PAIRS = Topology.uniform(4, 2)


def test_uniform_and_what_is_left() -> None:
    topology = Topology.uniform(6, 4)
    assert topology.nodes == ((0, 1, 2, 3),
                              (4, 5)) and not topology.uniform_nodes and topology.node_major
    assert topology.node_of == (0, 0, 0, 0, 1, 1) and topology.local_of == (0, 1, 2, 3, 0, 1)
    assert str(topology) == "2 node(s) of 2 to 4 rank(s) (given)"


def test_ranks_that_alternate_between_nodes() -> None:
    topology = Topology.from_keys(["b", "a", "b", "a"])
    assert topology.nodes == ((0, 2), (1, 3)) and topology.uniform_nodes and not topology.node_major
    assert topology.peers(3) == (1, 3) and "not in rank order" in str(topology)


def test_a_group_that_spans_parts_of_nodes() -> None:
    assert Topology.uniform(8, 4).restrict([3, 4, 5]).nodes == ((0,), (1, 2))


@pytest.mark.parametrize("nodes", [((0, 1), (1, 2)), ((0,), (2,)), ((0, 1), ()), ()])
def test_nodes_that_are_no_partition_are_refused(nodes: tuple) -> None:
    with pytest.raises(ValueError, match="exactly once"):
        Topology(nodes)


def test_other_bad_values() -> None:
    with pytest.raises(ValueError, match="nics=0"):
        Topology(((0,),), nics=0)
    with pytest.raises(ValueError, match="ranks per node=0"):
        Topology.uniform(4, 0)
    with pytest.raises(ValueError, match="topology of 3 ranks cannot be used"):
        LocalComm().prepare(Topology.one_node(3))


def test_why_flat() -> None:
    assert "one node" in Topology.one_node(4).why_flat()
    assert "one rank" in Topology.uniform(4, 1).why_flat()
    assert Topology.uniform(4, 2).why_flat() is None


def test_a_subgroup_inherits_its_part() -> None:
    def rank(comm):
        child = comm.subgroup([1, 2, 3])
        return child and child.topology.nodes

    assert run_simulated(4, rank, topology=Topology.uniform(4, 2)) == [None] + [((0,), (1, 2))] * 3


def test_another_topology_discards_what_depended_on_it_and_reaches_subgroups() -> None:
    def rank(comm):
        pair, found = comm.contiguous_subgroup(2), comm.state.get(list)
        found.append("measured")
        algorithms.get("2dh")(comm, torch.zeros(4), [1, 1, 1, 1], [1, 1, 1, 1])
        assert comm.prepare(PAIRS) is not None and comm.state.get(list) is found
        planned = comm.state.collects_for
        comm.prepare(Topology.uniform(4, 1))
        return (planned is not None, comm.state.collects_for, comm.state.get(list),
                pair.topology.nodes)

    assert run_simulated(4, rank, topology=PAIRS) == [(True, None, [], ((0,), (1,)))] * 4


def test_a_copied_state_keeps_the_topology_only() -> None:
    comm = LocalComm()
    comm.state.get(list).append("measured")
    comm.state.next_tag()
    for other in (copy.deepcopy(comm), pickle.loads(pickle.dumps(comm))):
        assert other.topology == comm.topology and other.state is not comm.state
        assert other.state.last_tag == 0 and other.state.get(list) == []


def test_tags_start_again_after_the_last() -> None:
    state = GroupState(last_tag=MAX_TAG - 1)
    assert [state.next_tag() for _ in range(3)] == [MAX_TAG, 1, 2]
    assert [state.next_tag(5), state.next_tag()] == [3, 8]
    assert GroupState(last_tag=MAX_TAG - 4).next_tag(5) == 1


def test_nodes_by_launcher_and_host_name() -> None:
    here = node_name({})
    assert node_name({"GROUP_RANK": "0"}) != node_name({"GROUP_RANK": "1"}) != here
    assert node_name({"SLURM_NODEID": "3"}).startswith("SLURM_NODEID=3@") and here.startswith("@")
    assert len(node_key(16)) == 16 and node_key(16) == node_key(16)


@pytest.mark.parametrize("rank", range(6))
def test_other_ranks_of_a_node(rank: int) -> None:
    comm = SimpleNamespace(rank=rank, topology=Topology.uniform(6, 3))
    peers = range(3) if rank < 3 else range(3, 6)
    assert sorted([*_Rows(comm, 1, None).others_here(), rank]) == [*peers]
