"""Measurements as a fit would predict them, times a factor by kind: no clock is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.measured import (
    ALL_GATHER,
    ALL_REDUCE,
    DENSE,
    HEAD,
    MATMUL,
    MOE,
    REDUCE_SCATTER,
    TENSOR,
    UPDATE,
    MeasuredNetwork,
    Processor,
    Timing,
)
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.trust import predicted_s
from tests.planner.problems import A100

SIZES, TOKENS, ROWS = (4096, 65536, 1 << 20, 64 << 20), (1024, 2048, 4096), (8, 128, 2048)
UPDATE_S = 1e-3  # of a million parameters


def measurements(m: ModelShape, c: Cluster, factors: Mapping[str, Sequence[float]] | None = None,
                 about: tuple[dict[str, str], dict[str, str]] = ({}, {})
                 ) -> tuple[MeasuredNetwork | None, Processor]:
    """What ranks of `c` would have measured; each repeat is the prediction times a factor.

    factors: by name of a timing, one for each repeat; left out: 1. about: of both records.
    """
    empty = Processor(about=about[1], device=A100, model=m, tensor_ranks=c.ranks_per_node,
                      timings=[Timing(name=UPDATE, size=1e6, seconds=[UPDATE_S])])

    def timing(name: str, size: float) -> Timing:
        expected = predicted_s(Timing(name=name, size=size, seconds=[1.0]), c, empty)
        assert expected
        return Timing(name=name, size=size,
                      seconds=[expected * f for f in (factors or {}).get(name, (1.0,))])

    exchanges = (*COSTS, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
    network = MeasuredNetwork(about=about[0], cluster=c, timings=[
        timing(name, size) for name in exchanges for size in SIZES
    ]) if c.ranks > 1 else None
    own = [timing(MATMUL, rows) for rows in ROWS]
    parts = (MOE, DENSE, HEAD, *([TENSOR] if c.ranks_per_node > 1 else []))
    own += [timing(name, tokens) for name in parts for tokens in TOKENS]
    return network, dataclasses.replace(empty, timings=[*own, *empty.timings])
