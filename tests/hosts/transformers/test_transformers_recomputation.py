"""Models of `transformers` with our blocks under its gradient checkpointing: the bits of those
without it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.20")

from moe_plugin.hosts.plain.blocks import auxiliary_loss  # noqa: E402
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks  # noqa: E402
from tests.checkpoint.hf_models import tiny, tokens  # noqa: E402

pytestmark = pytest.mark.fast


def step(settings: dict[str, Any], reentrant: bool | None) -> list[torch.Tensor]:
    """Loss and gradients of two micro-batches, after a pass without gradients."""
    model = tiny("mixtral").train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    swap_moe_blocks(model, settings=settings)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    ids, losses = tokens(model), []
    torch.manual_seed(3)
    with torch.no_grad():
        model(ids[:, 1:])
    for part in (ids, ids.flip(1)):
        loss = model(part, labels=part).loss
        # under reentrant checkpoints it has no gradient
        losses.append(loss if "losses" not in settings else loss + auxiliary_loss(model))
    for loss in losses[::-1]:
        loss.backward()
    return [*losses, *(p.grad for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("settings,kinds", [
    ({"router.second_expert_policy": "random"}, [True, False]),
    ({"router.noise": 4.0, "losses": {"global_batch": 1.0}}, [False]),
])
def test_gradients_are_those_without_checkpointing(settings: dict[str, Any],
                                                   kinds: list[bool]) -> None:
    want = step(settings, None)
    for kind in kinds:
        for found, wanted in zip(step(settings, kind), want, strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found, wanted)
