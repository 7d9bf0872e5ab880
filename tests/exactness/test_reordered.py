"""Experts in another order over ranks and nodes: the dense reference of the order before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_plugin import MoELayer
from moe_plugin.checkpoint.resize import reorder_experts
from moe_plugin.comm import Comm, Topology, run_simulated
from tests.combinations import all_pairs, name_of
from tests.exactness.harness import (
    RankResult,
    compare,
    config_of,
    load,
    naming,
    reference,
    run_layer,
)
from tests.oracle import Case, make_parameters

pytestmark = pytest.mark.fast

ORDERS = {8: [5, 0, 7, 2, 1, 6, 3, 4], 4: [2, 0, 3, 1], 2: [1, 0]}
CELLS = all_pairs({
    "experts": [(8, None), (4, None), (2, None), (4, 2)], "send": ["rows", "ranks", "nodes"],
    "k": [1, 3], "factor": [None, 0.6], "kind": ["ffn", "gated_ffn"],
    "tokens": [[9, 6, 0, 4], [5] * 4]})


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_outputs_and_gradients_stay(cell: dict[str, Any]) -> None:
    experts, shards = cell["experts"]
    order = ORDERS[experts]
    case = Case(4, experts, min(cell["k"], experts), cell["tokens"], None, cell["factor"],
                cell["kind"], seed=3, shards=shards)
    config = config_of(case, dispatch__send=cell["send"])

    def rank(comm: Comm) -> RankResult:
        layer = MoELayer(config, comm, dtype=make_parameters(case)["router"].dtype)
        load(layer, make_parameters(case), case)
        reorder_experts(layer, None, {"": order}, comm)
        return run_layer(case, layer)

    answer = reference(case)
    moved = dataclasses.replace(answer, grads={name: grad[order]
                                               for name, grad in answer.grads.items()})
    with naming(name_of(cell)):
        compare(case, run_simulated(4, rank, topology=Topology.uniform(4, 2)), moved)
