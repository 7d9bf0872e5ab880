"""fairseq's layers that are computed again in backward, with dropout and a router that draws: the
bits of those that are not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.memory.activations.auto import manage
from moe_plugin.routing import finish_step
from tests.hosts.fairseq.small import language_model, tokens, translation_model

WAYS: dict[str, dict[str, Any]] = {
    "checkpointed": {"checkpoint_activations": True},
    "offloaded": {"checkpoint_activations": True, "offload_activations": True},
    "recompute": {}, "swap": {}, "recompute,swap": {},
}
# by default a second expert is drawn
ROUTERS: dict[str, dict[str, Any]] = {
    "default": {}, "random": {"moe_second_expert_policy": "random"},
    **{name: {"moe_router": name, "moe_second_expert_policy": "all"}
       for name in ("gshard", "noisy_topk", "dense_to_sparse", "base", "sparsemixer")},
    "top 1 with jitter": {"moe_top1_expert": True, "moe_second_expert_policy": "all",
                          "moe_router_jitter": "0.2"},
    "input dropout": {"moe_second_expert_policy": "all", "moe_router_input_dropout": "0.3"},
    "global batch": {"moe_losses": "global_batch=1"},
}


def passed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss of a forward pass."""
    lengths = torch.full((len(ids),), ids.shape[1])
    out = model(ids)[0] if hasattr(model, "decoder") and not hasattr(model, "encoder") else model(
        ids, lengths, ids)[0]
    return out.square().mean() + 10 * sum(layer.gate_loss for layer in moe_layers(model))


def trained(build: Any, settings: dict[str, Any], way: str | None) -> list[torch.Tensor]:
    """All gradients and buffers of a step, after a pass without backward and one that is skipped.
    """
    model = build(dropout=0.3, attention_dropout=0.1, moe_freq=1, **settings,
                  **WAYS.get(way or "", {}))
    if way is not None and not WAYS[way]:
        stack = [*getattr(getattr(model, "encoder", None), "layers", []), *model.decoder.layers]
        names = way.split(",") * len(stack)
        manage(stack, names[:len(stack)], smallest=1)
    torch.manual_seed(7)
    with torch.no_grad():
        passed(model, tokens(length=5))
    passed(model, tokens())
    finish_step(model)
    losses = [passed(model, tokens(length=length)) for length in (8, 6)]
    for loss in losses[::-1]:
        loss.backward()
    found = [p.grad for p in model.parameters()] + counts(model)
    finish_step(model)
    return [*found, *counts(model), *losses, torch.get_rng_state()]


def counts(model: Any) -> list[torch.Tensor]:
    return [buffer for layer in moe_layers(model) for buffer in layer.moe_layer.buffers()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_are_those_without_recomputation(name: str, way: str) -> None:
    for found, wanted in zip(trained(language_model, ROUTERS[name], way),
                             trained(language_model, ROUTERS[name], None), strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or torch.equal(found, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_a_translation_model(way: str) -> None:
    """Up to rounding: decoder layers add to the gradient of the encoder's output in another order.
    """
    for found, wanted in zip(trained(translation_model, {"moe_second_expert_policy": "sampling"},
                                     way),
                             trained(translation_model, {"moe_second_expert_policy": "sampling"},
                                     None), strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
