"""Ranks that hold the same tokens: what index-slice dispatch (PPMoE) and Parm's schedules send.
Their numbers: test_matrix.
"""

from __future__ import annotations

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Traffic, run_simulated
from moe_plugin.config import MoEConfig
from tests.exactness.harness import config_of
from tests.oracle import Case

pytestmark = pytest.mark.fast


def _traffic(world: int, config: MoEConfig, tokens: int,
             reported: list[int] | None = None) -> Traffic:
    """reported: takes what the statistics of each rank say of the forward pass, and the traffic
    ends there.
    """
    traffic = Traffic()

    def rank(comm: Comm) -> None:
        layer = MoELayer(config, comm, dtype=torch.float64)
        for _ in range(2):  # ranks compare experts in the first two calls and not in the third
            layer(torch.zeros(tokens, 8, dtype=torch.float64))
        comm.barrier()
        traffic.bytes.clear()
        traffic.collectives.clear()
        comm.barrier()
        x = torch.randn(tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1),
                        requires_grad=True)
        out = layer(x)
        y = out.output
        comm.barrier()
        if reported is not None:
            reported.append(out.stats.bytes_sent)
            return
        if comm.rank == 0:
            traffic.collectives["forward"] = dict(traffic.collectives)
        comm.barrier()
        y.sum().backward()

    run_simulated(world, rank, traffic=traffic)
    return traffic


@pytest.mark.parametrize("factor", [None, 1.0, 0.0, -1.0])
def test_index_slice_is_one_all_reduce_a_direction_and_nothing_else(factor: float | None) -> None:
    for world, experts in [(2, 8), (4, 4), (4, 2)]:
        case = Case(1, experts, 2, [6], None, factor)
        found = _traffic(world, config_of(case, dispatch__name="index_slice"), 6).collectives
        forward = found.pop("forward")
        forward.pop("barrier"), found.pop("barrier")
        assert forward == {"all_reduce": 1} and found == {"all_reduce": 2}


def test_all_gather_dispatch_is_a_gather_and_a_scatter_a_direction() -> None:
    """Forward also the number of the longest rank's tokens. Bytes of ring collectives; 2K: gate
    weights (float64) and ids (int64) of K choices.
    """
    tokens, top_k, width = 6, 2, 8
    for world, experts in [(2, 8), (4, 4), (4, 2)]:
        config = config_of(Case(1, experts, top_k, [tokens], None), dispatch__name="all_gather")
        config.losses = {}
        traffic = _traffic(world, config, tokens)
        forward = traffic.collectives.pop("forward")
        # the ids first, so that sizes are known; then tokens and gate weights
        assert {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1
                }.items() <= forward.items() and "all_to_all" not in forward
        assert (traffic.collectives["all_gather"], traffic.collectives["reduce_scatter"]) == (3, 2)
        gathered = tokens * 8 * (width + 2 * top_k) + tokens * 8 * width
        scattered = tokens * 8 * width + tokens * 8 * (width + top_k)
        number = 2 * 8 * (world - 1) // world if world > 2 else 8
        assert sum(traffic.bytes.values()) == pytest.approx(
            world * ((world - 1) * (gathered + scattered) + number), abs=world * 16)


def test_parm_bytes_follow_the_formulas() -> None:
    """S1: 2 A2A(ETM N_ESP / N_MP) + AG(BLM); S2: the same all-to-alls + AG(ETM); twice, for
    backward.
    """
    world, replicas, experts, tokens = 8, 4, 2, 16
    shards, row = world // experts, 8 * 8
    for schedule in ("s1", "s2"):
        case = Case(1, experts, 2, [tokens], None, 1.0, bias=False)
        config = config_of(case, dispatch__name="padded", dispatch__equal_tokens=True)
        config.parallel.replicas, config.parallel.schedule, config.losses = replicas, schedule, {}
        slots = 2 * tokens  # ET = k f BL
        rows = slots * shards // replicas * row * (world - 1) / world
        gathered = (tokens if schedule == "s1" else slots * shards) // replicas * row * (replicas -
                                                                                         1)
        found = sum(_traffic(world, config, tokens).bytes.values())
        assert found == world * 2 * (2 * rows + gathered), schedule


@pytest.mark.parametrize("name,schedule", [
    ("index_slice", None), ("all_gather", None), ("ragged", None), ("ragged", "s1"),
    ("padded", None), ("padded", "s1"), ("padded", "s2")])
def test_statistics_report_all_bytes_of_the_forward_pass(name: str, schedule: str | None) -> None:
    for world, experts in [(2, 8), (4, 4), (4, 2)]:
        config = config_of(Case(1, experts, 2, [6], None, 1.0 if name == "padded" else None,
                                bias=False), dispatch__name=name)
        config.losses, config.dispatch.equal_tokens = {}, name == "padded"
        if schedule is not None:
            config.parallel.replicas, config.parallel.schedule = 2, schedule
        reported: list[int] = []
        sent = sum(_traffic(world, config, 6, reported).bytes.values())
        if name == "index_slice":  # a ring all-reduce of 6 tokens of 8 float64
            sent += 2 * (world - 1) * 6 * 8 * 8
        assert sum(reported) == sent > 0, (world, experts)


@pytest.mark.parametrize("settings,words", [({
    "replicas": 3
}, "parallel.replicas=3 does not divide 4 expert-parallel ranks. Use a divisor; the nearest is 2"),
                                            ({"replicas": 2, "schedule": "s2"
                                              }, "parallel.schedule='s2' divides slots"),])
def test_what_does_not_fit(settings: dict, words: str) -> None:
    config = config_of(Case(4, 4, 2, [1] * 4))
    for name, value in settings.items():
        setattr(config.parallel, name, value)
    with pytest.raises(ValueError, match=words):
        run_simulated(4, lambda comm: MoELayer(config, comm))
