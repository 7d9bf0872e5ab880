"""An ensemble of output heads on a GPT model with MoE layers, under the confident oracle loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.ensembles import confident_oracle_loss, ensemble_errors
from moe_plugin.hosts.megatron.ensemble import oracle_loss_function
from tests.hosts.megatron.layers import Case, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks

pytestmark = pytest.mark.megatron


def test_loss_function() -> None:
    logits, labels, mask = torch.randn(2, 4, 3,
                                       7), torch.randint(7, (2, 4)), torch.tensor([[1.0, 1, 1, 0],
                                                                                   [1, 1, 1, 1]])
    loss, logged = oracle_loss_function(labels, mask)(logits)
    group = torch.arange(8) // 4
    want = confident_oracle_loss(logits.flatten(0, 1), labels.flatten(), 1, 0.75, group_N=group,
                                 groups=2, mask_N=mask.flatten() > 0)
    torch.testing.assert_close(loss, want.loss_N.sum() / 7)
    total, tokens, _ = oracle_loss_function(labels, mask, per_token=True)(logits)
    assert tokens == 7 and tokens.dtype == torch.int
    torch.testing.assert_close(total, loss * 7)
    oracle, top1 = ensemble_errors(logits.flatten(0, 1), labels.flatten())
    real = mask.flatten() > 0
    assert logged["oracle error"].tolist() == [int(
        (oracle
         & real).sum()), 7] and logged["top-1 error"].tolist() == [int((top1 & real).sum()), 7]


def _train(steps: int) -> tuple[list[float], str]:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.hosts.megatron.ensemble import add_heads
    from moe_plugin.hosts.megatron.spec import moe_layer_spec

    case = Case(native={"num_moe_experts": 4})
    initialise_parallel(case)

    def gpt(shared: bool) -> Any:
        return core.call_supported(
            GPTModel, config=case.config(),
            transformer_layer_spec=moe_layer_spec(transformer_engine=False), vocab_size=32,
            max_sequence_length=12, position_embedding_type="rope",
            share_embeddings_and_output_weights=shared)

    try:
        add_heads(gpt(True), 3)
        message = ""
    except ValueError as error:
        message = str(error)
    model = add_heads(gpt(False), 3, hidden=8, sharing=0.7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tokens = torch.arange(12).repeat(4, 1) + torch.arange(4)[:, None]
    positions, labels = torch.arange(12).repeat(4, 1), tokens + 1
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(tokens, positions, mask)
        assert logits.shape == (4, 12, 3, 32)
        loss, _ = oracle_loss_function(labels, torch.ones(4, 12))(logits)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, message


def test_a_gpt_model_with_heads_learns() -> None:
    [(losses, message)] = on_ranks(1, _train, 30)
    assert losses[-1] < 0.75 * losses[0]
    assert "share_embeddings_and_output_weights=True cannot be used" in message
