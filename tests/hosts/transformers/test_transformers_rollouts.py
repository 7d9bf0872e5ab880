"""Rollouts replayed in models of transformers, whose routers are their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.20")

import transformers

from moe_plugin.hosts.transformers.rollouts import replay_rollouts
from tests.seeds import seeded

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
OF_KIND: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV3": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
                   "moe_intermediate_size": 16, "first_k_dense_replace": 0, "q_lora_rank": 16,
                   "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                   "v_head_dim": 8, "n_shared_experts": 1, "head_dim": 8},
    "Ernie4_5_Moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0,
                     "moe_intermediate_size": 16},
}


def model_of(kind: str, implementation: str = "moe_plugin") -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **OF_KIND[kind]})
    with seeded(0):
        return transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation=implementation)


@contextmanager
def calls(model: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """(ids [T, K], weights [T, K]) of each call of experts."""
    found: list[tuple[Tensor, Tensor]] = []
    handles = [part.register_forward_pre_hook(lambda _, args: found.append(args[1:3]))
               for part in model.modules() if hasattr(part, "is_concatenated")]
    yield found
    for handle in handles:
        handle.remove()


def other_choices(tokens: int) -> Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.rand(tokens, 2, 8, generator=g).argsort(-1)[..., :2]


@pytest.mark.parametrize("kind", OF_KIND)
def test_the_experts_of_a_rollout_are_computed(kind: str) -> None:
    """Its own choice gives its own bits; another one reaches the experts and has a gradient."""
    model = model_of(kind)
    tokens = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(1))
    with calls(model) as own:
        plain = model(tokens).logits
    with replay_rollouts(model, torch.stack([ids for ids, _ in own], 1)):
        assert torch.equal(model(tokens).logits, plain)
    ids_TLK = other_choices(12)
    with replay_rollouts(model, ids_TLK), calls(model) as replayed:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    assert torch.equal(torch.stack([ids for ids, _ in replayed], 1), ids_TLK)
    assert all(float(p.grad.abs().sum()) for name, p in model.named_parameters()
               if name.endswith(("gate.weight", "router.weight")))
    assert torch.equal(model(tokens).logits, plain)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_those_that_the_router_gives_these_experts(recompute: bool) -> None:
    """Mixtral's softmax over all, shared among the chosen ones, by hand."""
    model, ids_TLK = model_of("Mixtral", "eager"), other_choices(6)
    if recompute:
        model.train().gradient_checkpointing_enable()
    tokens, seen = torch.arange(6)[None], []
    gates = [layer.mlp.gate for layer in model.model.layers]
    for gate in gates:
        gate.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with replay_rollouts(model, ids_TLK), calls(model) as replayed:
        model(tokens, labels=tokens).loss.backward()
    assert len(replayed) == (4 if recompute else 2)
    for layer, (ids_TK, weights_TK) in enumerate(replayed[:2]):
        p_TE = torch.softmax(seen[layer].view(6, -1) @ gates[layer].weight.T, 1)
        p_TK = p_TE.gather(1, ids_TLK[:, layer])
        assert torch.equal(ids_TK, ids_TLK[:, layer])
        torch.testing.assert_close(weights_TK, p_TK / p_TK.sum(1, keepdim=True))
    for (ids_TK, weights_TK), layer in zip(replayed[2:], (1, 0), strict=False):
        assert torch.equal(ids_TK, replayed[layer][0])
        torch.testing.assert_close(weights_TK, replayed[layer][1])


def test_tokens_without_a_choice_take_the_routers() -> None:
    model, ids_TLK, tokens = model_of("Qwen3Moe"), other_choices(6), torch.arange(6)[None]
    ids_TLK[[2, 5]] = -1
    with calls(model) as own:
        model(tokens)
    with replay_rollouts(model, ids_TLK), calls(model) as replayed:
        model(tokens)
    assert torch.equal(replayed[0][0][[2, 5]], own[0][0][[2, 5]])
    assert torch.equal(replayed[0][0][[0, 1, 3, 4]], ids_TLK[[0, 1, 3, 4], 0])


def test_what_does_not_fit_is_refused() -> None:
    model, tokens = model_of("Mixtral"), torch.arange(5)[None]
    with pytest.raises(ValueError, match="A layer processes 5 tokens"), replay_rollouts(
            model, other_choices(6)):
        model(tokens)
    with pytest.raises(ValueError, match="have 2 layers, but this model has 0"), replay_rollouts(
            torch.nn.Linear(2, 2), other_choices(6)):
        pass
    with pytest.raises(ValueError, match="no forward pass that could be replayed"), replay_rollouts(
            model, other_choices(5)):
        model.lm_head(torch.zeros(1, 32))
    with replay_rollouts(model, other_choices(5)):
        with pytest.raises(ValueError, match="already replays a rollout"), replay_rollouts(
                model, other_choices(5)):
            pass
        model(tokens)
    block = model.model.layers[0].mlp
    block.gate.forward = lambda x: (None, torch.ones(5, 2), torch.zeros(5, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="called topk on the scores of its 8 experts 0 times"), (
            replay_rollouts(model, other_choices(5))):
        model(tokens)
