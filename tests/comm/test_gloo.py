"""The same algorithms over real processes."""

from __future__ import annotations

import ast
import copy
import os
import pickle
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from moe_plugin import MoELayer
from moe_plugin.comm import CommError, Topology, TorchComm, algorithms, torch_comm
from moe_plugin.comm.agreement import exchange_ints
from moe_plugin.comm.by_nodes import gather_by_nodes, reduce_scatter_by_nodes, wanted_rows
from moe_plugin.comm.functional import all_to_all
from moe_plugin.config import from_dict
from tests.comm.exchanges import column, expected_of, random_counts, rows_of
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed
WORLD = 4
PLACES = [
    Topology.uniform(4, 2),
    Topology.uniform(4, 3),
    Topology(((0, 2), (1, 3))),
    Topology.uniform(4, 1),
    Topology.one_node(4)
]
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8,
    torch.float8_e4m3fn, torch.bool
]


def _all_cases() -> list[str]:
    """Names of what went wrong on this rank."""
    wrong = []
    for place, name, dtype in [(p, n, d) for p in PLACES for n in algorithms.names()
                               for d in DTYPES]:
        comm = TorchComm()
        comm.prepare(place)
        for seed in range(2):
            counts = random_counts(WORLD, seed)
            got = algorithms.get(name)(comm, rows_of(comm.rank, counts, dtype), counts[comm.rank],
                                       column(counts, comm.rank))
            if not torch.equal(got.view(torch.uint8),
                               expected_of(comm.rank, counts, dtype).view(torch.uint8)):
                wrong.append(f"{name} {dtype} {place} uneven {seed}")
        even = [[2] * WORLD] * WORLD
        if not torch.equal(
                algorithms.get(name)(comm, rows_of(comm.rank, even, dtype)).view(torch.uint8),
                expected_of(comm.rank, even, dtype).view(torch.uint8)):
            wrong.append(f"{name} {dtype} {place} even")
    return wrong + _started_early() + _of_any_strides()


def _started_early() -> list[str]:
    """Exchanges that other collectives overtake, in every dtype."""
    comm, wrong, even = TorchComm(), [], [[2] * WORLD] * WORLD
    waits = [comm.start_all_to_all(rows_of(comm.rank, even, dtype)) for dtype in DTYPES]
    total = comm.all_reduce(torch.ones(3))
    for dtype, wait in reversed(list(zip(DTYPES, waits, strict=True))):
        if not torch.equal(wait().view(torch.uint8),
                           expected_of(comm.rank, even, dtype).view(torch.uint8)):
            wrong.append(f"started all_to_all {dtype}")
    return wrong if bool((total == WORLD).all()) else [*wrong, "all_reduce"]


def _of_any_strides() -> list[str]:
    """A broadcast leaves its argument as it is; a transposed tensor is gathered as it reads."""
    comm, wrong = TorchComm(), []
    x = torch.arange(6.0).view(2, 3).t() + 10 * comm.rank
    want = torch.cat([torch.arange(6.0).view(2, 3).t() + 10 * rank for rank in range(WORLD)])
    gather, given = getattr(dist, torch_comm._GATHER), []
    setattr(dist, torch_comm._GATHER,
            lambda out, x, *more, **named: (given.append(x), gather(out, x, *more, **named))[1])
    if not torch.equal(comm.all_gather(x), want) or not given[0].is_contiguous():  # as NCCL needs
        wrong.append("all_gather of a transposed tensor")
    setattr(dist, torch_comm._GATHER, gather)
    before = x.clone()
    if not torch.equal(comm.broadcast(x, 1), want[3:6]) or not torch.equal(x, before):
        wrong.append("broadcast")
    return wrong


def test_every_algorithm_placement_and_dtype() -> None:
    assert run_gloo(WORLD, _all_cases) == [[]] * WORLD


@pytest.mark.fast
def test_a_single_rank_gets_its_own_sums() -> None:
    """The path of NCCL, where a group of one rank has one piece."""
    alone = SimpleNamespace(size=1, receive_first=False, _count_rows=lambda *_: None,
                            error_context=lambda _: nullcontext(),
                            _bounded=lambda _, out, x: out.copy_(x))
    x = torch.randn(3, 2)
    assert torch.equal(TorchComm.reduce_scatter(alone, x), x)


def _gradients() -> bool:
    comm = TorchComm()
    comm.prepare(Topology.uniform(WORLD, 2))
    counts = random_counts(WORLD, 3)
    for name in algorithms.names():
        x = rows_of(comm.rank, counts, torch.float64).requires_grad_()
        out = all_to_all(x, comm, algorithms.get(name), counts[comm.rank],
                         column(counts, comm.rank))
        (out.square().sum() * (10.0 + comm.rank)).backward()
        assert torch.equal(x.grad, 2 * x.detach() * (10.0 + x.detach()[:, 1:2])), name
    return True


def test_gradients() -> None:
    assert all(run_gloo(WORLD, _gradients))


def _counters(name: str) -> tuple[int, int]:
    comm = TorchComm()
    comm.prepare(Topology.uniform(WORLD, 2))
    algorithms.get(name)(comm, torch.zeros(WORLD, 5))
    return comm.counters.messages, comm.bytes_sent


@pytest.mark.parametrize(("name", "messages", "sent"), [
    ("linear", [3] * 4, [60] * 4),
    ("native", [3] * 4, [60] * 4),
    ("2dh", [2] * 4, [80] * 4),
    ("leader", [2, 1, 2, 1], [160, 80, 160, 80]),
])
def test_counted_messages_and_bytes(name: str, messages: list[int], sent: list[int]) -> None:
    """20 bytes a piece. 2DH: one message in the node, one out, two pieces each. Leaders send on two
    ranks' two pieces, and a buffer back.
    """
    assert run_gloo(WORLD, _counters, name) == list(zip(messages, sent, strict=True))


def _detected(launcher: list[str]) -> tuple:
    os.environ["GROUP_RANK"] = launcher[dist.get_rank()]
    comm = TorchComm()
    with pytest.raises(CommError, match="topology is not known; call comm.prepare"):
        comm.topology  # noqa: B018 - reading is not collective, so it must not detect
    early = comm.contiguous_subgroup(2)
    detected = comm.prepare()
    pair = comm.subgroup([1, 2])
    assert TorchComm().topology is detected, "layers over one process group share its state"
    return detected.nodes, early.topology.nodes, pair and pair.topology.nodes


def test_topology_is_detected_from_the_launcher() -> None:
    found = run_gloo(WORLD, _detected, ["0", "1", "1", "0"])
    assert [nodes for nodes, _, _ in found] == [((0, 3), (1, 2))] * WORLD
    assert [early for _, early, _ in found] == [((0,), (1,))] * WORLD
    assert found[1][2] == found[2][2] == ((0, 1),) and found[0][2] is None


def _two_steps(place: Topology) -> list[str]:
    """What went wrong; rows that a node does not want are zeros after gathering, and not summed."""
    comm, wrong = TorchComm(), []
    x_WN = torch.arange(WORLD * 3.0).view(WORLD, 3) + 100 * torch.arange(WORLD)[:, None]
    everywhere = torch.arange(WORLD * WORLD * 2.0).view(WORLD, WORLD, 2)
    plain = comm.all_gather(x_WN[comm.rank]), comm.reduce_scatter(everywhere[comm.rank].flatten())
    comm.prepare(place)
    assert comm.by_nodes
    sent = comm.counters.messages
    if not torch.equal(comm.all_gather(x_WN[comm.rank]), plain[0]):
        wrong.append("all-gather")
    if comm.counters.messages - sent != 1 + 2:  # one to the other node, two pieces on this one
        wrong.append("messages")
    if not torch.equal(comm.reduce_scatter(everywhere[comm.rank].flatten()), plain[1]):
        wrong.append("reduce-scatter")
    on_node_AN = torch.rand(WORLD * 5, 2, generator=torch.Generator().manual_seed(3)) < 0.4
    on_node_AN[:5] = False  # nobody wants anything of rank 0
    wanted, mine = wanted_rows(comm, on_node_AN), on_node_AN[:, place.node_of[comm.rank]]
    x_A = torch.arange(WORLD * 5.0) + 1
    got_A = gather_by_nodes(comm, x_A.view(WORLD, 5)[comm.rank], wanted)
    if not torch.equal(got_A, torch.where(mine, x_A, 0)):
        wrong.append("wanted rows")
    total_T = reduce_scatter_by_nodes(comm, got_A, wanted)
    nodes_T = on_node_AN.view(WORLD, 5, 2)[comm.rank].sum(1)
    if not torch.equal(total_T, 2 * nodes_T * x_A.view(WORLD, 5)[comm.rank]):
        wrong.append("sums of wanted rows")
    if comm.all_gather(torch.zeros(0, 2)).shape != (0, 2):
        wrong.append("nothing")
    return wrong


@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]], ids=str)
def test_gathering_in_two_steps(place: Topology) -> None:
    """Between nodes, then inside them: the same numbers as in one ring."""
    assert run_gloo(WORLD, _two_steps, place) == [[]] * WORLD


def _bytes_of_a_subgroup() -> tuple[bool, list[int]]:
    layers = [TorchComm(), TorchComm()]
    parts = [comm.contiguous_subgroup(2) for comm in layers]
    for part, count in zip(parts, (1, 2), strict=True):
        part.all_gather(torch.zeros(count))
    return parts[0].group is parts[1].group, [comm.bytes_sent for comm in layers]


def test_a_subgroup_is_made_once_and_counts_for_its_layer() -> None:
    assert run_gloo(WORLD, _bytes_of_a_subgroup) == [(True, [4, 8])] * WORLD


def _subgroups_of_a_part() -> float:
    """Two disjoint groups, as expert-parallel groups of a larger job; each makes sub-groups of its
    own that the other never hears of.
    """
    rank = dist.get_rank()
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    comm = TorchComm(group, timeout_s=100)
    for _ in range(1 + rank // 2):
        child = comm.subgroup([0, 1])
    assert child.timeout.total_seconds() == 100
    return child.all_reduce(torch.tensor(float(rank))).item()


def test_subgroups_of_disjoint_groups() -> None:
    assert run_gloo(WORLD, _subgroups_of_a_part) == [1, 1, 5, 5]


def _subgroup_after_others() -> tuple[list[float], int | None]:
    """Ranks that made 0, 0, 1 and 2 groups before make the same ones."""
    comm = TorchComm(timeout_s=100)
    alone = [comm.subgroup([comm.rank]) for _ in range(max(0, comm.rank - 1))]
    made = [comm.subgroup([3, 2, 0]), comm.subgroup([0, 2, 3]), comm.subgroup([0, 1])]
    sums = [group.all_reduce(torch.tensor(float(comm.rank))).item() for group in made if group]
    assert [group.ranks for group in alone] == [[comm.rank]] * len(alone)
    return sums, made[0] and made[0].rank


def test_a_subgroup_does_not_depend_on_groups_made_before() -> None:
    expected = [([5, 5, 1], 0), ([1], None), ([5, 5], 1), ([5, 5], 2)]
    assert run_gloo(WORLD, _subgroup_after_others) == expected


class _OnGPU(TorchComm):
    """A group that takes tensors of a device alone, as NCCL's does."""

    device = torch.device("cuda", 0)


def _numbers_of_hosts() -> tuple[Any, ...]:
    comm = _OnGPU()
    other = (comm.rank + 1) % WORLD
    most = comm.agree_max([comm.rank, -comm.rank])
    got = exchange_ints(comm, {other: [comm.rank] * 2, comm.rank: [7]},
                             {(comm.rank - 1) % WORLD: 2, comm.rank: 1})
    return most, sorted(got.items()), comm.hosts is _OnGPU().hosts, TorchComm().hosts.ranks


def test_numbers_of_hosts_pass_no_device() -> None:
    results = run_gloo(WORLD, _numbers_of_hosts)
    for rank, (most, got, once, ranks) in enumerate(results):
        before = (rank - 1) % WORLD
        assert most == [WORLD - 1, 0]
        assert dict(got) == {rank: [7], before: [before] * 2}
        assert once and ranks == list(range(WORLD))


def _subgroup_of_a_bound_group() -> tuple[bool, str]:
    """With a default group bound to a device, an NCCL group would be split off it by all ranks."""
    world, seen = dist.group.WORLD, []
    split = c10d._get_split_source
    c10d._get_split_source = lambda group: seen.append(group) or split(group)
    world.bound_device_id = torch.device("cuda:0")
    pair = TorchComm().subgroup([0, 1] if dist.get_rank() < 2 else [2, 3])
    still = str(world.bound_device_id)
    world.bound_device_id = None
    pair.barrier()
    return not seen, still


def test_a_subgroup_is_not_split_off_the_default_group() -> None:
    assert run_gloo(WORLD, _subgroup_of_a_bound_group) == [(True, "cuda:0")] * WORLD


def _peer_that_never_comes(folder: Path) -> None:
    comm = TorchComm(timeout_s=1.0)
    dist.barrier()  # so that the others come together
    if comm.rank != 2:
        with pytest.raises(CommError) as caught:
            algorithms.get("linear")(comm, torch.zeros(WORLD, 5))
        (folder / str(comm.rank)).write_text(str(caught.value))
    while len([*folder.iterdir()]) < WORLD - 1:  # no rank ends before all have said what they saw
        time.sleep(0.02)
    if comm.rank == 2:
        os._exit(0)
    dist.destroy_process_group()


def test_a_missing_peer_is_named(tmp_path: Path) -> None:
    """After the time-out of the exchange (1 s), not of the group; rank 2 is alive but does not take
    part.
    """
    with pytest.raises(AssertionError, match="rank 2 died"):
        run_gloo(WORLD, _peer_that_never_comes, tmp_path)
    for rank in (0, 1, 3):
        text = (tmp_path / str(rank)).read_text()
        assert f"rank {rank} of 4 in group 'ranks [0, 1, 2, 3]'" in text
        assert "of 20 bytes" in text and "torch.float32" in text
        assert "2" in text.split("not received yet: from ranks [")[1].split("]")[0]


COLLECTIVES = {
    "all_reduce(sum) of torch.float32 (4, 3)": lambda comm, x: comm.all_reduce(x),
    "all_gather of torch.float32 (4, 3)": lambda comm, x: comm.all_gather(x),
    "all_to_all of torch.float32 (4, 3)": lambda comm, x: comm.all_to_all(x),
    "broadcast from 1 of torch.float32 (4, 3)": lambda comm, x: comm.broadcast(x, 1),
    "send_receive of torch.float32": lambda comm, x: comm.reduce_scatter(x),
    "barrier": lambda comm, x: comm.barrier(),
}


def _nobody_else_comes(folder: Path) -> None:
    """Rank 0 of a group of its own maker for each collective; the group waits for minutes."""
    groups = [dist.new_group([0, 1]) for _ in COLLECTIVES]
    if dist.get_rank():
        while not (folder / "done").exists():
            time.sleep(0.05)
        os._exit(0)
    found = []
    for group, call in zip(groups, COLLECTIVES.values(), strict=True):
        begun = time.monotonic()
        with pytest.raises(CommError) as caught:
            call(TorchComm(group, timeout_s=0.5), torch.zeros(4, 3))
        found.append((str(caught.value), time.monotonic() - begun))
    (folder / "found").write_text(repr(found))
    (folder / "done").touch()
    os._exit(0)


def test_every_collective_ends_in_time_in_groups_made_by_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0 died"):
        run_gloo(2, _nobody_else_comes, tmp_path)
    found = ast.literal_eval((tmp_path / "found").read_text())
    for name, (text, seconds) in zip(COLLECTIVES, found, strict=True):
        assert text.startswith("rank 0 of 2 in group 'ranks [0, 1]'") and name in text
        assert 0.4 < seconds < 60  # the group waits three times as long


def _copied_layer() -> tuple[bool, bool]:
    layer = MoELayer(from_dict({"model_dim": 4, "num_experts": 2}), TorchComm())
    copied, x = copy.deepcopy(layer), torch.randn(3, 4)
    with pytest.raises(TypeError, match="cannot be pickled.*save state_dict"):
        pickle.dumps(layer)
    return copied.comm is layer.comm, torch.equal(copied(x).output, layer(x).output)


def test_a_layer_over_processes_can_be_copied() -> None:
    """As for an average of the weights; process groups themselves cannot be."""
    assert run_gloo(2, _copied_layer) == [(True, True)] * 2


def _reduce_scatter() -> list[str]:
    comm, wrong = TorchComm(), []
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        for shape in ((WORLD * 3, 2), (WORLD, 5, 2), (0, 3), (WORLD, 0)):
            whole = [
                torch.arange(torch.Size(shape).numel()).view(shape).remainder(7).add(rank).to(dtype)
                for rank in range(WORLD)
            ]
            sent = comm.bytes_sent
            got, length = comm.reduce_scatter(whole[comm.rank].clone()), shape[0] // WORLD
            expected = sum(whole[1:], whole[0])[comm.rank * length : (comm.rank + 1) * length]
            if not torch.equal(got,
                               expected) or comm.bytes_sent - sent != (WORLD - 1) * expected.nbytes:
                wrong.append(f"{dtype} {shape}")
    x = torch.ones(WORLD + 1)
    with pytest.raises(ValueError, match=f"{WORLD + 1}"):
        comm.reduce_scatter(x)
    return wrong


def test_reduce_scatter_adds_up_and_sends_no_more_than_its_share() -> None:
    assert run_gloo(WORLD, _reduce_scatter) == [[]] * WORLD


def _rounded_sums(nodes: int) -> list[str]:
    """The 16-bit dtypes whose sums have larger errors than a sum in float32, rounded once, and once
    more on each node if there are several.
    """
    comm, wrong = TorchComm(), []
    place = comm.prepare(Topology.uniform(comm.size, comm.size // nodes))
    for dtype in (torch.bfloat16, torch.float16):
        drawn = torch.Generator().manual_seed(7)
        of_ranks = torch.randn(comm.size, comm.size, 999, generator=drawn).to(dtype)
        got = comm.reduce_scatter(of_ranks[comm.rank].clone())[0]
        parts, unit = of_ranks[:, comm.rank].double(), torch.finfo(dtype).eps / 2
        allowed = unit * parts.sum(0).abs() + 1e-6
        if nodes > 1:
            allowed += sum(1.01 * unit * parts[list(node)].sum(0).abs() for node in place.nodes)
        if bool(((got - parts.sum(0)).abs() > allowed).any()):
            wrong.append(str(dtype))
    return wrong


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (6, 2)])
def test_sums_of_16_bit_values_are_not_rounded_at_every_rank(ranks: int, nodes: int) -> None:
    """Gradients of gathered weights in bfloat16 do not lose accuracy with the number of ranks."""
    assert run_gloo(ranks, _rounded_sums, nodes) == [[]] * ranks
