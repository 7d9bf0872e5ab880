"""Experts that tokens choose together: counted over ranks and calls, once where activations are
recomputed, and only where it is asked for.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import ObserveConfig, from_dict
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.observe.choices import ChoiceLog
from moe_plugin.planner.order_files import load_choices
from moe_plugin.routing.replay import checkpoint

pytestmark = pytest.mark.fast


class Model(nn.Module):
    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.moe = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "router": {
            "name": "group_limited", "groups": 2, "group_top_k": 2, "top_k": 2}}), comm)
        self.chosen: list[Tensor] = []

    def forward(self, x_TD: Tensor) -> Tensor:
        self.chosen.append(self.moe.router(x_TD.detach()).ids_TK)  # a call of the router, too
        return checkpoint(lambda x: self.moe(x).output, x_TD)


def trained(comm: Comm, path: Path, steps: int) -> list[Tensor]:
    torch.manual_seed(comm.rank)
    model = Model(comm)
    with torch.no_grad():
        model.moe.router.weight_ED.copy_(torch.eye(4, 8))
    run = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.0),
                        lambda model, x: model(x).square().mean(), world=comm,
                        observe=ObserveConfig(choices=str(path), interval=2))
    for _ in range(steps):
        run(torch.randn(6, 8))
    run.close()
    return model.chosen


def test_counts_of_all_ranks_since_the_last_record(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    ranks = run_simulated(2, lambda comm: trained(comm, path, 4))
    found = load_choices(path)["moe"]
    recent = [ids_TK.tolist() for chosen in ranks for ids_TK in chosen[2:]]
    wanted = Counter(pair for ids in recent for chosen in ids
                     for pair in itertools.product(chosen, repeat=2))
    # every call's choices are in twice: the model calls the router, and so does the layer
    assert [[count // 2 for count in row] for row in found.pairs_EE] == [
        [wanted[e, f] for f in range(4)] for e in range(4)]
    assert (found.tokens, found.groups) == (2 * 2 * 2 * 6, 2)
    mine = Counter(tuple(chosen) for ids_TK in ranks[0][2:] for chosen in ids_TK.tolist())
    assert Counter(found.sets) == {chosen: 2 * count for chosen, count in mine.items()}


def test_layers_have_no_hook_without_it(tmp_path: Path) -> None:
    model = Model(LocalComm())
    TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: m(x).sum(),
                  observe=ObserveConfig(jsonl=str(tmp_path / "stats.jsonl")))
    assert not model.moe.router._forward_hooks


def test_a_router_that_knows_places_is_refused(tmp_path: Path) -> None:
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "router": {
        "name": "topology_quota"}}))
    with pytest.raises(ValueError, match="router TopologyQuotaRouter of layer 'a'.*must be none"):
        ChoiceLog(str(tmp_path / "x.json"), {"a": layer}, LocalComm())
    with pytest.raises(ValueError, match="there is no folder"):
        ChoiceLog(str(tmp_path / "no" / "x.json"), {}, LocalComm())
