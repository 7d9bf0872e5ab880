"""One rank among ranks that are none sees what it would see among equal ones."""

from __future__ import annotations

import pytest
import torch

from moe_plugin.comm import Comm
from moe_plugin.comm.simulated import run_simulated
from moe_plugin.comm.topology import Topology
from moe_plugin.config import from_dict
from moe_plugin.lab.bench.equal_ranks import EqualRanks
from moe_plugin.lab.bench.studies.ranks import exponent, lines
from moe_plugin.layer import MoELayer

pytestmark = pytest.mark.fast


def _call(comm: Comm, send: str, experts: int) -> tuple[int, int, int]:
    config = from_dict({
        "model_dim": 8, "num_experts": experts, "router": {"top_k": 2},
        "experts": {"hidden_dim": 8}, "dispatch": {"send": send}, "comm": {"all_to_all": "linear"},
        "parallel": {"mode": "fixed"}})
    layer = MoELayer(config, comm)
    own = torch.Generator().manual_seed(5)  # ranks are threads that share torch's
    with torch.no_grad():
        layer.router.weight_ED.normal_(generator=own)
    x_TD = torch.randn(12, 8, generator=own)
    stats = layer(x_TD.requires_grad_()).stats
    assert stats is not None
    return int(stats.rows), stats.rows_sent, stats.rows_between


@pytest.mark.parametrize("send", ["rows", "ranks", "nodes"])
@pytest.mark.parametrize(("ranks", "experts"), [(4, 4), (4, 16), (6, 12)])
def test_the_rows_of_a_rank_among_equal_ones(send: str, ranks: int, experts: int) -> None:
    topology = Topology.uniform(ranks, 2)
    real = run_simulated(ranks, lambda comm: _call(comm, send, experts), topology=topology)[0]
    assert _call(EqualRanks(ranks, per_node=2), send, experts) == real


def test_equal_collectives() -> None:
    group, x = EqualRanks(8, per_node=4), torch.arange(8.0)
    assert group.all_reduce(x).equal(8 * x) and group.all_reduce(x, "max").equal(x)
    assert group.all_gather(x[:2]).tolist() == [0.0, 1.0] * 8
    assert group.reduce_scatter(x).tolist() == [0.0]
    assert group.all_to_all(x).tolist() == [0.0] * 8
    assert group.all_to_all(x[:3], [1, 2] + [0] * 6, [1] * 8).tolist() == [0.0] * 8
    assert group.all_to_all(x[:3], [1, 2] + [0] * 6, [1, 0, 3] + [0] * 5).shape == (4,)
    assert group.agree_max([3.0, 1.0]) == [3.0, 1.0]
    inner = group.subgroup(range(4))
    assert inner is not None and inner.size == 4 and inner.topology == Topology.one_node(4)
    assert group.subgroup([1, 2]) is None


def test_growth_is_the_slope_of_the_logarithms() -> None:
    assert exponent({2: 3.0, 8: 48.0, 64: 3072.0}) == pytest.approx(2)
    assert exponent({2: 5.0, 64: 5.0}) == pytest.approx(0, abs=1e-12)
    cells = [{"kind": kind, "ranks": ranks, "experts": 8, "call_s": 1e-3 * ranks}
             for kind in ("rows", "nodes") for ranks in (2, 8)]
    found = dict(lines({"layers": cells, "plans": [{"ranks": 8, "seconds": 1.0}], "tuned": [
        {"ranks": ranks, "experts": 8, "trials_s": 6.0, "trials": 3} for ranks in (2, 8)]}))
    assert found["a call, a token once to each node, 8 experts"] == {2: 2e-3, 8: 8e-3}
    assert found["a call that tries layouts, 8 experts"] == {2: 2.0, 8: 2.0}
    assert found["planning a change of places"] == {}  # older numbers have none
