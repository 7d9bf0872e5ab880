"""The layer against a small reference of what fairseq's `moe` branch computes: the same dropped
tokens, losses and logged numbers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.hosts.fairseq.layers import FairseqMoELayer, moe_layers
from tests.hosts.fairseq.small import language_model, tokens
from tests.hosts.fairseq.test_criterion import criterion

pytestmark = pytest.mark.fast


def branch_top2(logits_SE: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [S, E] after dropping, kept choices bool [S, 2], gate loss: GShard's top-2 gate as
    the branch computes it (policy `all`, weights divided after dropping).
    """
    gates_SE = logits_SE.softmax(1)
    first_SE = F.one_hot(gates_SE.argmax(1), gates_SE.shape[1])
    without_SE = logits_SE.masked_fill(first_SE.bool(), float("-inf"))
    second_SE = F.one_hot(without_SE.argmax(1), gates_SE.shape[1])
    place1_SE = first_SE.cumsum(0) - 1
    place2_SE = second_SE.cumsum(0) - 1 + first_SE.sum(0)
    kept1_SE, kept2_SE = first_SE * (place1_SE < capacity), second_SE * (place2_SE < capacity)
    weights_SE = gates_SE * (kept1_SE + kept2_SE)
    loss = (gates_SE.mean(0) * first_SE.float().mean(0)).mean() * gates_SE.shape[1]**2
    weights_SE = weights_SE / weights_SE.sum(1, keepdim=True).clamp(min=torch.finfo().eps)
    return weights_SE, torch.stack([kept1_SE.sum(1), kept2_SE.sum(1)], 1).bool(), loss


class BranchLayer:
    """Stands in for `FairseqMoELayer.forward`, with its parameters; remembers what was kept."""

    def __init__(self, ours: FairseqMoELayer) -> None:
        self.ours, self.kept_SK = ours, None

    def __call__(self, x_TBD: Tensor, padding_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        x_SD = x_TBD.transpose(0, 1).reshape(-1, x_TBD.shape[-1])
        moe, tokens = self.ours.moe, x_SD.shape[0]
        experts = moe.experts
        capacity = 2 * math.ceil(
            tokens / moe.config.num_experts) if self.ours.training else math.ceil(0.25 * tokens)
        weights_SE, self.kept_SK, loss = branch_top2(F.linear(x_SD, moe.router.weight_ED), capacity)
        inner = F.relu(torch.einsum("sd,edf->sef", x_SD, experts.w_in_LDF) + experts.bias_in_LF)
        each_SED = torch.einsum("sef,efd->sed", inner, experts.w_out_LFD) + experts.bias_out_LD
        y_SD = (weights_SE[..., None] * each_SED).sum(1)
        return y_SD.view(x_TBD.shape[1], x_TBD.shape[0], -1).transpose(0, 1), loss


def sample(batch: int) -> dict[str, Any]:
    ids = tokens(batch=batch, length=9)
    return {
        "net_input": {"src_tokens": ids[:, :-1], "src_lengths": torch.full(
            (batch,), 8)}, "target": ids[:, 1:].contiguous(), "ntokens": 8 * batch,
        "nsentences": batch, "id": torch.arange(batch),
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch", [4, 1])
def test_drops_the_tokens_that_the_branch_drops(batch: int, training: bool,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model(moe_second_expert_policy="all", activation_fn="relu")
    model.train(training)
    [layer] = moe_layers(model)
    with torch.no_grad():
        layer.moe_layer.moe.router.weight_ED.mul_(8)  # uneven loads
    made, outputs = criterion(moe_gate_loss_wt=0.1), []
    layer.moe_layer.register_forward_hook(lambda *call: outputs.append(call[2][0].detach()))
    ours, _, logged = made(model, sample(batch))
    reference = BranchLayer(layer.moe_layer)
    monkeypatch.setattr(layer.moe_layer, "forward", reference)
    branch, _, _ = made(model, sample(batch))
    lost = ~reference.kept_SK
    assert lost.any(), "the capacity drops nothing"
    stats_lost = [float(logged[f"overflow_expert{choice + 1}"]) for choice in (0, 1)]
    assert stats_lost == pytest.approx([100 * float(lost[:, k].float().mean()) for k in (0, 1)])
    mine, theirs = outputs
    # tokens that no expert took
    assert torch.equal((mine == 0).all(-1), (theirs == 0).all(-1))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours, branch, atol=1e-4, rtol=1e-6)


def test_second_choices_are_counted_as_the_branch_counts_them() -> None:
    """Histograms hold every second choice, overflow only those that the policy took."""
    model = language_model(moe_second_expert_policy="random",
                           moe_normalize_gate_prob_before_dropping=True).train()
    [layer] = moe_layers(model)
    router, seen = layer.moe_layer.moe.router, []
    router.register_forward_hook(lambda _, args, routing: seen.append((args[0], routing)))
    _, _, logged = criterion()(model, sample(4))
    [(x_SD, routing)] = seen
    logits_SE = F.linear(x_SD, router.weight_ED)
    second_S = logits_SE.argsort(1, descending=True)[:, 1]
    taken_S = routing.ids_TK[:, 1] >= 0
    assert 0 < int(taken_S.sum()) < len(taken_S), "the policy takes some second choices"
    percent_E = 100 * torch.bincount(second_S, minlength=4).sort(descending=True)[0] / len(second_S)
    assert float(logged["expert2_balance_top"]) == pytest.approx(float(percent_E[0]))
    assert float(logged["expert2_balance_bottom"]) == pytest.approx(float(percent_E[-1]))
    assert float(logged["unused_expert2_count"]) == int((percent_E == 0).sum())
    lost = int(taken_S.sum()) - int(layer.moe_layer.stats.kept_KE[1].sum())
    assert float(logged["overflow_expert2"]) == pytest.approx(100 * lost / int(taken_S.sum()))


@pytest.mark.parametrize("settings", [
    {}, {"moe_eval_capacity_token_fraction": 0.01}, {"moe_capacity_factor": "0.3"},
    {"moe_capacity_factor": "1.0", "moe_eval_capacity_factor": "-0.3"}])
def test_the_first_tokens_of_a_generation_find_their_experts(settings: dict[str, Any]) -> None:
    """One token is computed as without a capacity, and so is the first of a few."""
    settings = {"moe_second_expert_policy": "all", **settings}
    exact = language_model(**{**settings, "moe_eval_capacity_token_fraction": -1.0,
                              "moe_capacity_factor": "none", "moe_eval_capacity_factor": "none",
                              "moe_dispatch": "ragged"}).eval()
    limited = language_model(**settings).eval()
    for length in (1, 2, 3):
        ids = tokens(batch=1, length=length)
        with torch.no_grad():
            torch.testing.assert_close(limited(ids)[0][:, 0], exact(ids)[0][:, 0])
    assert moe_layers(limited)[0].moe_layer.stats.capacity == 1
