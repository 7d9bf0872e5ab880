"""The all-to-all cost model: the published crossover table, its shape, the fit, cluster files,
units.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner import (
    COSTS,
    Cluster,
    Link,
    dump_cluster,
    load_cluster,
    predict,
    predict_table,
)
from moe_plugin.planner.all_to_all_cost import overlapped_s
from moe_plugin.planner.fit import Measurement, fit, nonnegative_least_squares, relative_errors
from moe_plugin.planner.units import (
    parse_grid,
    parse_rate,
    parse_size,
    parse_time,
    record,
)
from scripts.bench.studies.all_to_all import wire_floor_s

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"
MIB = 1 << 20
# linear time / 2DH time; 5 us and 22 GB/s between, 3 us and 250 GB/s inside nodes of 8 GPUs with a
# card each, copies at 1.3 TB/s
RANKS = (16, 64, 256, 512, 1024, 2048)
CROSSOVER = {1: (1.50, 3.28, 5.71, 6.64, 7.25, 7.60), 32: (0.82, 1.02, 1.46, 1.96, 2.77, 3.87),
             128: (0.79, 0.90, 1.03, 1.18, 1.47, 1.97), 256: (0.78, 0.88, 0.95, 1.03, 1.18, 1.47)}


@pytest.mark.parametrize("mib", CROSSOVER)
def test_the_crossover_table(mib: int) -> None:
    cluster = load_cluster(CLUSTERS / "a100_ib.yaml")
    ratios = [
        predict(cluster.with_ranks(n), "linear", mib * MIB).seconds /
        predict(cluster.with_ranks(n), "2dh", mib * MIB).seconds for n in RANKS
    ]
    assert tuple(round(ratio, 2) for ratio in ratios) == CROSSOVER[mib]


def test_the_crossover_moves_right_with_size_and_2dh_gains_with_ranks() -> None:
    cluster = load_cluster(CLUSTERS / "a100_ib.yaml")
    found = predict_table(cluster, [16 * 2**i for i in range(9)], [MIB, 32 * MIB, 256 * MIB])
    rows = {(r["bytes"], r["ranks"], r["algorithm"]): r["ms"] for r in found}
    first = []
    for size in (MIB, 32 * MIB, 256 * MIB):
        gains = [rows[size, 16 * 2**i, "linear"] / rows[size, 16 * 2**i, "2dh"] for i in range(9)]
        assert gains == sorted(gains)
        first.append(next(i for i, gain in enumerate(gains) if gain > 1))
    assert first == sorted(first) and first[0] < first[-1]


def test_one_card_a_node_is_the_leaders_place() -> None:
    cluster = load_cluster(CLUSTERS / "one_nic.yaml")
    def best(shape: Cluster, size: float) -> str:
        return min(COSTS, key=lambda name: predict(shape, name, size).seconds)

    assert best(cluster.with_ranks(64), 64 << 10) == "leader"
    assert best(cluster.with_ranks(64), 64 * MIB) != "leader"
    assert best(cluster.with_ranks(8), 64 << 10) == "linear"  # one node


def test_degenerate_grids_cost_what_linear_costs() -> None:
    for cluster in (Cluster(nodes=1, ranks_per_node=4, intra=Link(alpha_s=1.0)),
                    Cluster(nodes=4, ranks_per_node=1, inter=Link(alpha_s=1.0))):
        assert len({predict(cluster, name, 1024).seconds for name in COSTS}) == 1


truth = st.builds(
    lambda a, b, c, d, e, f: Cluster(nodes=4, ranks_per_node=4, inter=Link(alpha_s=a, beta_s=b),
                                     intra=Link(alpha_s=c, beta_s=d * b), phase_s=e, copy_s=f * b),
    st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8), st.floats(1e-7, 1e-4), st.floats(0.001, 0.05),
    st.floats(0, 1e-3), st.floats(0, 0.01))


@given(truth)
@settings(deadline=None, max_examples=30)
def test_a_fit_finds_back_what_made_the_times(cluster: Cluster) -> None:
    """From 4x4 to 8x4; the links inside are the faster ones, as the model's overlap assumes."""
    def times(nodes: int) -> list[Measurement]:
        return [
            Measurement(nodes, 4, name, size,
                        predict(cluster.resized(nodes), name, size).seconds) for name in COSTS
            for size in (4e3, 16e3, 64e3, 256e3, 1e6, 4e6)
        ]

    result = fit(times(4), cluster.resized(4))
    assert result.mean_error < 0.05
    assert max(relative_errors(result.cluster, times(8))) < 0.2


EMULATED = Cluster(nodes=4, ranks_per_node=4, inter=Link(beta_s=4e-8), intra=Link(
    alpha_s=5e-5, beta_s=1e-9), phase_s=1e-3, copy_s=2e-10, host=Link(alpha_s=6e-5, beta_s=1e-9),
                   wake_s=2e-4)


def emulated_times(*grids: tuple[int, int], machine: bool = True) -> list[Measurement]:
    found = []
    for grid in grids:
        for name in COSTS:
            for size in (16e3, 64e3, 256e3, 1e6, 4e6):
                cost = predict(EMULATED.resized(*grid), name, size)
                machine_s = sum(EMULATED.machine_s(*phase.machine) for phase in cost.phases)
                found.append(
                    Measurement(*grid, name, size, cost.seconds, machine_s if machine else None))
    return found


def test_a_fit_finds_back_the_machine_under_an_emulated_cluster() -> None:
    """Fitted to at most 16 ranks, held against 32, where the processors and not the wire are the
    limit of small messages.
    """
    result = fit(emulated_times((2, 2), (2, 4), (4, 2), (4, 4)), Cluster(), emulated=True)
    assert result.mean_error < 0.02
    assert max(relative_errors(result.cluster, emulated_times((8, 4)))) < 0.05
    without = dataclasses.replace(result.cluster, host=Link(), wake_s=0.0)
    assert max(relative_errors(without, emulated_times((8, 4)))) > 0.5


@given(st.floats(0, 1), st.floats(0, 1))
def test_wire_and_machine_work_at_the_same_time(wire: float, machine: float) -> None:
    both = overlapped_s(wire, machine)
    assert max(wire, machine) * (1 - 1e-9) <= both <= min(wire + machine,
                                                          1.19 * max(wire, machine)) + 1e-12


def test_a_fit_needs_enough() -> None:
    with pytest.raises(ValueError, match="1 measurements are too few to fit"):
        fit([Measurement(4, 4, "linear", 1.0, 1.0)], Cluster())
    with pytest.raises(ValueError, match="set machine_s in every measurement"):
        fit(emulated_times((2, 2), machine=False), Cluster(), emulated=True)


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=50)
def test_nonnegative_least_squares_against_scipy(seed: int) -> None:
    import numpy as np
    from scipy.optimize import nnls

    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(12, 5)) * 10.0 ** rng.integers(-6, 6, 5), rng.normal(size=12)
    mine, theirs = nonnegative_least_squares(a, b), nnls(a, b)[0]
    assert (mine >= 0).all()
    assert np.linalg.norm(a @ mine - b) <= np.linalg.norm(a @ theirs - b) * (1 + 1e-6) + 1e-12


def test_wire_floor() -> None:
    """8 nodes x 4 ranks, 64 KiB, 200 Mbit/s: 229,376 bytes leave a node, 6 % framing, 1 ms of
    delay.
    """
    assert wire_floor_s(8, 4, 65536, 200e6,
                        1e-3) == pytest.approx(229376 * 1538 / 1448 * 8 / 200e6 + 1e-3)
    assert wire_floor_s(1, 4, 65536, 200e6, 1e-3) == 0


def test_cluster_files_round_trip(tmp_path: Path) -> None:
    for path in sorted(CLUSTERS.glob("*.yaml")):
        cluster = load_cluster(path)
        copy = tmp_path / "copy.yaml"
        copy.write_text(dump_cluster(cluster, "two\nlines"))
        assert load_cluster(copy) == cluster and copy.read_text().startswith("# two\n# lines\n")


@pytest.mark.parametrize(("text", "said"), [
    ("- 1", "not a mapping"),
    (": :", "is not YAML"),
    ("speed: 3", "unknown key 'speed'. Known keys: name, nodes"),
    ("nodes: two", "'two' of type 'str' could not be converted to Int"),
    ("inter: {alpha: 1}", "unknown key 'inter.alpha'. Known keys: alpha_s, beta_s"),
    ("inter: {alpha_s: x}", "inter.alpha_s Value 'x' .* to Float"),
    ("nodes: 0", "nodes=0 must be from 1 to"),
    ("inter: {beta_s: -1}", "number from 0 to"),
    ("phase_s: .inf", "number from 0 to"),
])
def test_bad_cluster_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        load_cluster(file)


def test_a_missing_cluster_file_and_numbers_as_text() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_cluster("/nowhere/cluster.yaml")
    assert record(Cluster, {"inter": {"alpha_s": "3e-6"}}, "cluster").inter.alpha_s == 3e-6


def test_ranks_that_fill_no_nodes() -> None:
    with pytest.raises(ValueError, match="12 ranks do not fill the nodes .* 8 ranks each"):
        Cluster(ranks_per_node=8).with_ranks(12)
    assert Cluster(ranks_per_node=8).with_ranks(4).nodes == 1


def test_units() -> None:
    assert [parse_size(t) for t in ("64KiB", "1 MiB", "100kB", "512", "1.5MiB")
            ] == [65536, MIB, 100_000, 512, 3 * MIB // 2]
    assert (parse_rate("200mbit"), parse_rate("1gbit"), parse_time("1ms"), parse_time("500us"),
            parse_grid("8x4")) == (200e6, 1e9, 1e-3, 5e-4, (8, 4))
    for parse, bad in ((parse_size, "64 bananas"), (parse_rate, "fast"), (parse_time, "-1ms"),
                       (parse_grid, "8")):
        with pytest.raises(ValueError, match=bad.split()[0]):
            parse(bad)
