"""`StatsRecorder.add_model`: which layers and passes it takes, and what is known of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.config import ObserveConfig
from moe_plugin.hosts.plain.blocks import MoEBlock
from moe_plugin.observe import StatsRecorder
from moe_plugin.observe.history.records import LayerRecord
from moe_plugin.observe.layer_rules import LAYER_RULES
from moe_plugin.observe.recorder import summary

pytestmark = pytest.mark.fast


class TheirExperts(nn.Module):
    """Called as the experts of `transformers`."""

    is_concatenated = True

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.ones(3, 1))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states * self.down_proj[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = MoEBlock(8, num_experts=4)
        self.second = MoELayer(MoEConfig(model_dim=8, num_experts=2))
        self.mlp = nn.ModuleDict({"experts": TheirExperts()})

    def forward(self, x: Tensor, ids_TK: Tensor, recompute: str = "") -> Tensor:
        if recompute:
            x = checkpoint(self.first, x, use_reentrant=recompute == "reentrant")
        else:
            x = self.first(x)
        x = self.second(x).output
        return self.mlp["experts"](x, ids_TK, top_k_weights=torch.ones_like(ids_TK))


IDS_TK = torch.tensor([[0, 1], [0, 2], [0, -1], [1, 3]])  # -1, 3: no expert


def test_every_layer_is_recorded_under_its_block_s_name() -> None:
    recorder = StatsRecorder(ObserveConfig(interval=1))
    model = Model()
    assert recorder.add_model(model) == ["first", "second", "mlp"]
    model(torch.randn(4, 8), IDS_TK)
    records = recorder.reduce()
    assert {name: (r["calls"], r["tokens"], sum(r["load"])) for name, r in records.items()} == {
        "first": (1, 4, 8), "second": (1, 4, 8), "mlp": (1, 4, 6)}
    assert records["mlp"]["load"] == [3, 2, 1] and records["mlp"]["dropped"] == 0


def test_of_routers_that_are_not_ours_the_entropy_is_unknown() -> None:
    recorder = StatsRecorder(ObserveConfig(interval=1))
    recorder.add_model(model := Model())
    model(torch.randn(4, 8), IDS_TK)
    records = recorder.reduce()
    assert records["mlp"]["entropy"] is None and records["first"]["entropy"] > 0
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert "moe_entropy" not in summary(records)
    assert "moe_entropy" in summary({"first": records["first"]})


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_a_pass_that_is_recomputed_counts_once(recompute: str) -> None:
    recorder = StatsRecorder(ObserveConfig(interval=1))
    recorder.add_model(model := Model())
    model(torch.randn(4, 8, requires_grad=True), IDS_TK, recompute).sum().backward()
    assert [record["calls"] for record in recorder.reduce().values()] == [1, 1, 1]


def test_evaluation_is_left_out() -> None:
    recorder = StatsRecorder(ObserveConfig(interval=1))
    recorder.add_model(model := Model())
    model.eval()(torch.randn(4, 8), IDS_TK)
    assert recorder.reduce() == {}


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no MoE layer .* Call replace_ffn"):
        StatsRecorder(ObserveConfig()).add_model(nn.Linear(2, 2))


@pytest.mark.parametrize(("entropy", "rule"), [(None, "uneven"), (1.0, "no_balance")])
def test_a_balance_loss_is_missed_where_it_would_be_known(entropy: float | None, rule: str) -> None:
    records = [LayerRecord(step=step, layer="a", load=(5, 1, 1, 1), tokens=8, max_over_mean=2.5,
                           entropy=entropy) for step in range(9)]
    found = {each.name for each in LAYER_RULES if each.look({"a": records}, True)[0]}
    assert rule in found and not {"uneven", "no_balance"} - {rule} & found


def test_files_have_the_records(tmp_path: Path) -> None:
    recorder = StatsRecorder(ObserveConfig(interval=1, jsonl=str(tmp_path / "stats.jsonl")))
    recorder.add_model(model := Model())
    model(torch.randn(4, 8), IDS_TK)
    recorder.step(0)
    recorder.close()
    rows = [json.loads(line)
            for line in (tmp_path / "stats.jsonl").read_text().splitlines()]
    settings = rows.pop(0)  # those that our own layers were given
    assert settings["settings"]["num_experts"] == "4, 2"
    assert settings["changed"]["model_dim"] == ["8", "0"] and "router.name" not in settings[
        "changed"]
    assert {row["layer"]: row["entropy"] is None for row in rows} == {
        "first": False, "second": False, "mlp": True}
