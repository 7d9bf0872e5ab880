"""Every algorithm moves exactly what the linear one moves, and sends as many messages and bytes as
its formula says.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.comm import Comm, CommError, Exchange, Topology, Traffic, algorithms, run_simulated
from moe_plugin.comm.functional import all_to_all
from moe_plugin.comm.handles import start
from moe_plugin.kernels import kernels
from moe_plugin.planner import COSTS, Cluster, Link, predict
from tests.comm.clock import Clock
from tests.comm.exchanges import WIDTH, column, expected_of, random_counts, rows_of

pytestmark = pytest.mark.fast

GRIDS = [(8, 2), (8, 4), (16, 4), (12, 3), (4, 4), (4, 1), (6, 4)]
NAMES = algorithms.names()
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16,
    torch.uint8, torch.float8_e4m3fn
]


def exchanged(name: str, x: torch.Tensor, send: list[int] | None = None,
              recv: Callable[[int], list[int]] | None = None) -> Callable[[Comm], torch.Tensor]:
    """What a rank runs; recv: lengths by rank."""
    return lambda comm: algorithms.get(name)(comm, x, send, recv and recv(comm.rank))


def check(topology: Topology, name: str, counts: list[list[int]],
          dtype: torch.dtype = torch.float32) -> None:
    def rank(comm):
        send, recv = counts[comm.rank], column(counts, comm.rank)
        return algorithms.get(name)(comm, rows_of(comm.rank, counts, dtype), send, recv)

    for me, got in enumerate(run_simulated(topology.size, rank, topology=topology)):
        want = expected_of(me, counts, dtype)
        assert got.dtype == dtype and got.shape == want.shape
        assert torch.equal(got.contiguous().view(torch.uint8),
                           want.view(torch.uint8)), f"{name} on {topology}, rank {me}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "per_node"), GRIDS)
def test_uneven_pieces(size: int, per_node: int, name: str) -> None:
    for seed in range(3):
        check(Topology.uniform(size, per_node), name, random_counts(size, seed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "per_node"), GRIDS)
def test_even_pieces(size: int, per_node: int, name: str) -> None:
    """Also without given splits, where no sizes are exchanged; also without any row."""
    for rows in (2, 0):
        counts = [[rows] * size for _ in range(size)]
        check(Topology.uniform(size, per_node), name, counts)
        got = run_simulated(size,
                            lambda comm, counts=counts: algorithms.get(name)(
                                comm, rows_of(comm.rank, counts)),
                            topology=Topology.uniform(size, per_node))
        for me in range(size):
            assert torch.equal(got[me], expected_of(me, counts))


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Topology, list[list[int]]]:
    """Any placement of ranks on nodes and any splits."""
    size = draw(st.integers(1, 9))
    nodes = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    row = st.lists(st.one_of(st.just(0), st.integers(0, 4)), min_size=size, max_size=size)
    return Topology.from_keys(nodes), draw(st.lists(row, min_size=size, max_size=size))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(case=exchanges())
def test_any_placement_any_splits(name: str, case: tuple[Topology, list[list[int]]]) -> None:
    check(case[0], name, case[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype(name: str, dtype: torch.dtype) -> None:
    check(Topology.uniform(6, 4), name, random_counts(6, 1), dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0,), (2, 5), ()])
def test_any_row_shape(name: str, shape: tuple[int, ...]) -> None:
    """Rows without elements, of several dimensions, or plain numbers."""
    counts = random_counts(8, 4)

    def rank(comm):
        send, recv = counts[comm.rank], column(counts, comm.rank)
        x = torch.full((sum(send), *shape), float(comm.rank))
        return algorithms.get(name)(comm, x, send, recv), recv

    for got, recv in run_simulated(8, rank, topology=Topology.uniform(8, 4)):
        want = torch.arange(8.0).repeat_interleave(torch.tensor(recv))
        assert torch.equal(got, want.view(-1, *[1] * len(shape)).expand(-1, *shape))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "per_node"), GRIDS)
def test_gradients_go_back_the_same_way(size: int, per_node: int, name: str) -> None:
    counts = random_counts(size, 7)

    def rank(comm):
        x = rows_of(comm.rank, counts, torch.float64).requires_grad_()
        send, recv = counts[comm.rank], column(counts, comm.rank)
        out = all_to_all(x, comm, algorithms.get(name), send, recv)
        factor = 10.0 + comm.rank  # each rank's loss weighs what it got by its own factor
        (out.square().sum() * factor).backward()
        return x

    for x in run_simulated(size, rank, topology=Topology.uniform(size, per_node)):
        assert torch.equal(x.grad, 2 * x.detach() * (10.0 + x.detach()[:, 1:2]))


@pytest.mark.parametrize("name", ["linear", "native", "2dh", "leader"])
@pytest.mark.parametrize(("size", "per_node"), [(8, 2), (8, 4), (16, 4), (12, 3), (4, 4), (4, 1)])
def test_messages_and_bytes_are_those_of_the_formula(size: int, per_node: int, name: str) -> None:
    topology, traffic, rows = Topology.uniform(size, per_node), Traffic(), 2
    run_simulated(size, lambda comm: algorithms.get(name)(comm, torch.zeros(size * rows, WIDTH)),
                  traffic=traffic, topology=topology)
    nodes, bytes_per_rank = size // per_node, size * rows * WIDTH * 4
    cost = predict(Cluster(nodes=nodes, ranks_per_node=per_node),
                   {"native": "linear"}.get(name, name), bytes_per_rank)
    assert traffic.between(topology) == nodes * cost.inter_messages
    assert traffic.between(topology, "bytes") == nodes * cost.inter_bytes
    assert traffic.inside(topology) == nodes * cost.intra_messages
    assert traffic.inside(topology, "bytes") == nodes * cost.intra_bytes


def test_messages_a_node_in_numbers() -> None:
    """P^2 (N-1), P (N-1), N-1 for 4 ranks on each of 4 nodes."""
    cluster = Cluster(nodes=4, ranks_per_node=4)
    assert {name: predict(cluster, name, 1.0).inter_messages
            for name in COSTS} == {"linear": 48, "2dh": 12, "leader": 3}


@pytest.mark.parametrize("name", ["2dh", "leader"])
def test_uneven_pieces_send_counts_inside_the_node_only(name: str) -> None:
    topology, traffic, counts = Topology.uniform(8, 4), Traffic(), [[1] * 8 for _ in range(8)]
    run_simulated(
        8, lambda comm: algorithms.get(name)
        (comm, rows_of(comm.rank, counts), counts[0], counts[0]), traffic=traffic,
        topology=topology)
    assert traffic.between(topology) == {"2dh": 8, "leader": 2}[name]
    assert traffic.between(topology, "bytes") == 2 * 4 * 4 * WIDTH * 4


@pytest.mark.parametrize("name", ["2dh", "leader"])
@pytest.mark.parametrize("nics", [1, 4])
def test_simulated_time_is_that_of_the_formula(name: str, nics: int) -> None:
    """Phases follow each other, so simulated clocks and closed form agree to rounding (copies cost
    nothing here).
    """
    links = {
        "intra": Link(alpha_s=3e-6, beta_s=1e-9), "inter": Link(alpha_s=5e-6, beta_s=4e-9),
        "phase_s": 1e-6
    }
    cluster, topology = Cluster(nodes=4, ranks_per_node=4, nics=nics,
                                **links), Topology.uniform(16, 4, nics)
    clock, rows = Clock(cluster, topology), 64
    run_simulated(16, lambda comm: algorithms.get(name)(comm, torch.zeros(16 * rows)), clock=clock)
    assert clock.elapsed == pytest.approx(predict(cluster, name, 16 * rows * 4).seconds, rel=1e-9)


def test_simulated_time_of_linear_shares_the_card() -> None:
    """Never below the busiest card; above the formula only by what several senders that hit one
    card at once cost.
    """
    cluster = Cluster(nodes=4, ranks_per_node=4, nics=1, intra=Link(alpha_s=3e-6, beta_s=1e-9),
                      inter=Link(alpha_s=5e-6, beta_s=4e-9))
    clock, size = Clock(cluster, Topology.uniform(16, 4)), 16 * 64 * 4
    run_simulated(16, lambda comm: algorithms.get("linear")(comm, torch.zeros(16 * 64)),
                  clock=clock)
    card = cluster.inter.seconds(48, 48 * 64 * 4)
    assert card <= clock.elapsed <= 1.25 * predict(cluster, "linear", size).seconds


def test_wrong_splits_are_refused() -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match="3 rows cannot be split into 4"):
            run_simulated(4, exchanged(name, torch.zeros(3, 1)), topology=Topology.uniform(4, 2))
        with pytest.raises(CommError, match="expected|unread"):
            run_simulated(2, exchanged(name, torch.zeros(3, 1), [1, 2], lambda r: [1 + r, 2]))


def test_stride_copies_of_2dh_go_through_the_kernel(own_entries: None) -> None:
    """Two a rank, by `transpose_chunks` of the registry: on a GPU its Triton kernel."""
    kernel, called = kernels.get("transpose_chunks"), []

    @kernel.add("spy", why_not=lambda *_: None)
    def spy(x: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
        called.append((outer, inner))
        return kernel.implementation("torch")(x, outer, inner)

    counts = [[2] * 6 for _ in range(6)]
    got = run_simulated(6, lambda comm: algorithms.get("2dh")(comm, rows_of(comm.rank, counts)),
                        topology=Topology.uniform(6, 2))
    assert sorted(called) == [(2, 3)] * 6 + [(3, 2)] * 6
    assert all(torch.equal(got[me], expected_of(me, counts)) for me in range(6))


def test_a_plain_function_is_an_exchange(own_entries: None) -> None:
    @algorithms.register("reversed peers")
    def mine(comm: Comm, x: torch.Tensor, send: list[int] | None = None,
             recv: list[int] | None = None) -> torch.Tensor:
        """Sends to the peers of highest rank first."""
        return comm.all_to_all(x, send, recv)

    entry = algorithms.entry("reversed peers")
    assert isinstance(entry.value, Exchange) and entry.value.in_background
    assert entry.summary == "Sends to the peers of highest rank first."
    counts = random_counts(3, 1)

    def rank(comm: Comm) -> bool:
        send, recv = counts[comm.rank], column(counts, comm.rank)
        out = start(comm, entry.value, rows_of(comm.rank, counts), send, recv).wait()
        return torch.equal(out, expected_of(comm.rank, counts))

    assert all(run_simulated(3, rank))


def test_what_is_no_exchange_is_refused() -> None:
    with pytest.raises(TypeError, match="all_to_all 'three' is 3"):
        algorithms.register("three")(3)
    with pytest.raises(TypeError, match="register an Exchange object"):
        algorithms.register("class")(type("Class", (Exchange,), {}))
    assert "three" not in algorithms and "class" not in algorithms


def test_a_broadcast_belongs_to_its_rank() -> None:
    """A rank may write into it; neither another rank nor the argument changes. It has no gradient,
    as in torch.
    """
    def rank(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((3,), float(comm.rank), requires_grad=True)
        got = comm.broadcast(x, 1)
        got += comm.rank
        return x, got

    for me, (x, got) in enumerate(run_simulated(3, rank)):
        assert torch.equal(x, torch.full((3,), float(me)))
        assert torch.equal(got, torch.full((3,), 1.0 + me)) and not got.requires_grad
