"""Gate loss and metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fairseq import metrics

from moe_plugin.hosts.fairseq.criterion import (
    MoECrossEntropyCriterion,
    MoELabelSmoothedCrossEntropyCriterion,
    check_balance,
)
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.fairseq.metrics import stats_metrics
from moe_plugin.hosts.fairseq.options import MoECrossEntropyConfig, MoELabelSmoothedConfig
from moe_plugin.output import LayerStats
from tests.hosts.fairseq.small import language_model, task, tokens
from tests.logs import warned

pytestmark = pytest.mark.fast


def sample() -> dict[str, Any]:
    ids = tokens()
    return {
        "net_input": {"src_tokens": ids}, "target": ids, "ntokens": ids.numel(), "nsentences": 3,
        "id": torch.arange(3)
    }


def criterion(**settings: Any) -> MoECrossEntropyCriterion:
    return MoECrossEntropyCriterion.build_criterion(
        MoECrossEntropyConfig(sentence_avg=False, **settings), task())


def inner_and_gates() -> tuple[float, list[float]]:
    model = language_model(decoder_layers=2, moe_freq=1, moe_second_expert_policy="all").eval()
    inner, _, _ = criterion(moe_gate_loss_wt=0.0)(model, sample())
    model(**sample()["net_input"])
    return float(inner), [float(layer.gate_loss) for layer in moe_layers(model)]


@pytest.mark.parametrize(("combine", "transform"), [("average", "none"), ("sum", "none"),
                                                    ("average", "neg_log"), ("sum", "neg_log")])
def test_gate_loss_is_added_once_per_token(combine: str, transform: str) -> None:
    model = language_model(decoder_layers=2, moe_freq=1, moe_second_expert_policy="all").eval()
    inner, gates = inner_and_gates()
    gate = sum(gates) / (2 if combine == "average" else 1)
    gate = -math.log(gate) if transform == "neg_log" else gate
    loss, size, logged = criterion(moe_gate_loss_wt=0.3, moe_gate_loss_combine_method=combine,
                                   moe_gate_loss_transform=transform)(model, sample())
    assert size == 24
    assert float(loss) == pytest.approx(inner + 0.3 * gate * 24, rel=1e-5)
    assert float(logged["inner_loss"]) == pytest.approx(inner, rel=1e-5)
    assert float(logged["moe_loss"]) == pytest.approx(gate * 24, rel=1e-5)


def test_gate_loss_of_a_uniform_router_is_one() -> None:
    model = language_model()
    torch.nn.init.zeros_(moe_layers(model)[0].moe_layer.moe.router.weight_ED)
    model(tokens())
    assert float(moe_layers(model)[0].gate_loss) == pytest.approx(1.0, rel=1e-5)


def test_dense_model_gives_the_inner_loss() -> None:
    loss, _, logged = criterion()(language_model(moe_freq=0), sample())
    assert float(loss) == float(logged["inner_loss"])


def test_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="--moe-gate-loss-wt -1"):
        criterion(moe_gate_loss_wt=-1)


def _warnings(model: Any, used: Any) -> list[str]:
    with warned("moe_plugin.routing.registry") as shown:
        check_balance(model, used)
    return shown


def test_a_gate_loss_without_weight_is_warned_of() -> None:
    model = language_model()
    [text] = _warnings(model, criterion(moe_gate_loss_wt=0.0))
    assert "--moe-gate-loss-wt 0" in text and "nothing keeps the experts balanced" in text
    assert _warnings(model, criterion(moe_gate_loss_wt=0.01)) == []
    assert _warnings(language_model(moe_freq=0), criterion(moe_gate_loss_wt=0.0)) == []
    balanced = language_model(moe_router="sigmoid_bias", moe_second_expert_policy="all")
    assert _warnings(balanced, criterion(moe_gate_loss_wt=0.0)) == []


def _gradients(given_up: bool) -> list[torch.Tensor]:
    model = language_model(checkpoint_activations=True, moe_second_expert_policy="sampling").train()
    # as when memory runs out between forward and backward: fairseq goes on with the next batch
    if given_up:
        criterion()(model, sample())
    torch.manual_seed(3)
    criterion()(model, sample())[0].backward()
    return [p.grad for p in model.parameters()]


def test_a_step_that_was_given_up_leaves_no_routing_behind() -> None:
    torch.testing.assert_close(_gradients(given_up=True), _gradients(given_up=False), rtol=0,
                               atol=0)


@pytest.mark.parametrize("smoothed", [False, True])
def test_log_line_holds_the_branch_names(smoothed: bool) -> None:
    made = MoELabelSmoothedCrossEntropyCriterion.build_criterion(
        MoELabelSmoothedConfig(sentence_avg=False, label_smoothing=0.1, moe_gate_loss_wt=0.1),
        task()) if smoothed else criterion(moe_gate_loss_wt=0.1)
    _, _, logged = made(language_model(), sample())
    with metrics.aggregate(new_root=True) as seen:
        type(made).reduce_metrics([logged, logged])
    line = seen.get_smoothed_values()
    for name in ("loss", "inner_loss", "moe_gate_loss", "overflow_expert1", "overflow_expert2",
                 "entropy_gating", "expert1_balance_top", "expert1_balance_bottom",
                 "unused_expert1_count", "expert2_balance_top", "unused_expert2_count", "ppl"):
        assert name in line
    assert line["loss"] == pytest.approx(
        line["inner_loss"] + 0.1 * line["moe_gate_loss"] / math.log(2), abs=2e-3)
    if not smoothed:
        assert line["ppl"] == pytest.approx(2 ** line["inner_loss"], rel=1e-2)


def test_metrics_of_a_known_layer() -> None:
    # 10 tokens, 5 experts: first choices 6 3 1 0 0 of which 4 + 3 + 1 fit, second choices 2 each,
    # all fit
    stats = LayerStats(load_KE=torch.tensor([[6, 3, 1, 0, 0], [2, 2, 2, 2, 2]]),
                       kept_KE=torch.tensor([[4, 3, 1, 0, 0], [2, 2, 2, 2, 2]]),
                       entropy=torch.tensor(1.5), tokens=torch.tensor(10), losses={})
    seen = {key: float(value) for key, value in stats_metrics(stats).items()}
    assert seen == {
        "entropy_gating": 1.5, "overflow_expert1": 20.0, "expert1_balance_top": 60.0,
        "expert1_balance_bottom": 0.0, "unused_expert1_count": 2.0, "overflow_expert2": 0.0,
        "expert2_balance_top": 20.0, "expert2_balance_bottom": 20.0, "unused_expert2_count": 0.0,
    }
