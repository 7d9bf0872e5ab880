"""Rollouts replayed: choices, weights, gradients, and how samples are cut to what a rank sees."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.routing.rollouts import (
    choices_of_layers,
    packed,
    padded,
    replay_rollouts,
    rollout,
    tokens_of_rank,
)
from tests.seeds import seeded

pytestmark = pytest.mark.fast
EXPERTS, K, DIM = 6, 2, 8


class Model(nn.Module):
    def __init__(self, comm: Comm | None = None, layers: int = 3, **router: Any) -> None:
        super().__init__()
        with seeded(0):
            self.layers = nn.ModuleList(
                MoELayer(from_dict({
                    "model_dim": DIM, "num_experts": EXPERTS, "experts": {"hidden_dim": 16},
                    "router": {"name": "topk", "top_k": K, **router}}),
                    comm or LocalComm(), dtype=torch.float64) for _ in range(layers))
        self.chosen: list[Tensor] = []
        for layer in self.layers:
            layer.router.register_forward_hook(
                lambda _, args, routing: self.chosen.append(routing.ids_TK))

    def forward(self, x_TD: Tensor, recompute: bool = False) -> Tensor:
        for layer in self.layers:
            def call(y_TD: Tensor, layer: nn.Module = layer) -> Tensor:
                return y_TD + layer(y_TD).output
            x_TD = checkpoint(call, x_TD, use_reentrant=False) if recompute else call(x_TD)
        return x_TD


def choices(tokens: int, layers: int = 3, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, layers, EXPERTS, generator=g).argsort(-1)[..., :K]


def dense(layer: MoELayer, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
    """A layer's output for these choices: weights are a softmax over all, shared among them."""
    w, experts = layer.router.weight_ED, layer.experts
    p_TE = torch.softmax(x_TD @ w.T.to(x_TD.dtype), 1)
    p_TK = p_TE.gather(1, ids_TK)
    p_TK = p_TK / p_TK.sum(1, keepdim=True)
    rows = []
    for x_D, ids, weights in zip(x_TD, ids_TK.tolist(), p_TK, strict=True):
        rows.append(sum(weight * (
            nn.functional.gelu(x_D @ experts.w_in_LDF[e] + experts.bias_in_LF[e])
            @ experts.w_out_LFD[e] + experts.bias_out_LD[e])
            for e, weight in zip(ids, weights, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_output_and_gradients_are_those_of_the_rollouts_experts(recompute: bool,
                                                                training: bool) -> None:
    model, ids_TLK = Model().train(training), choices(5)
    x_TD = torch.randn(5, DIM, dtype=torch.float64, requires_grad=True)
    wanted = x_TD
    for place, layer in enumerate(model.layers):
        wanted = wanted + dense(layer, wanted, ids_TLK[:, place])
    parameters = [x_TD, *model.parameters()]
    want = torch.autograd.grad(wanted.square().sum(), parameters)
    with replay_rollouts(model, ids_TLK):
        y_TD = model(x_TD, recompute)
        got = torch.autograd.grad(y_TD.square().sum(), parameters)
    torch.testing.assert_close(y_TD, wanted)
    torch.testing.assert_close(got, want)
    assert all(layer.router.forced is None for layer in model.layers)


def test_tokens_without_a_choice_take_the_routers() -> None:
    model, ids_TLK, x_TD = Model(layers=1), choices(5, 1), torch.randn(5, DIM, dtype=torch.float64)
    model(x_TD)
    ids_TLK[[1, 4]] = -1
    with replay_rollouts(model, ids_TLK):
        model(x_TD)
    own_TK, got_TK = model.chosen
    assert torch.equal(got_TK[[1, 4]], own_TK[[1, 4]])
    assert torch.equal(got_TK[[0, 2, 3]], ids_TLK[[0, 2, 3], 0])


def test_over_ranks_and_micro_batches() -> None:
    """Other tokens on each rank, one of which has none."""
    def rank(comm: Comm) -> list[bool]:
        model, same = Model(comm), []
        for tokens in (4, 7 * comm.rank):
            ids_TLK = choices(tokens, seed=tokens)
            model.chosen.clear()
            with replay_rollouts(model, ids_TLK):
                model(torch.randn(tokens, DIM, dtype=torch.float64)).sum().backward()
            same.append(torch.equal(torch.stack(model.chosen, 1), ids_TLK))
        return same

    assert run_simulated(2, rank) == [[True, True]] * 2


@pytest.mark.parametrize("layers", [[0], [0, 3], [-1, 0]])
def test_selected_layers_must_exist(layers: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must contain 2 numbers in 0\.\.2"):
        choices_of_layers(choices(5), layers, [EXPERTS] * 2)
    assert len(choices_of_layers(choices(5), [0, 2], [EXPERTS] * 2)) == 2


def test_samples_of_engines() -> None:
    ids_TLK = choices(4)
    assert torch.equal(rollout(ids_TLK.numpy().astype(np.int16)), ids_TLK)
    text = base64.b64encode(ids_TLK.numpy().astype(np.int32).tobytes())
    for one in (text, text.decode()):
        assert torch.equal(rollout(one, 3, K), ids_TLK)


def test_batches_are_cut_as_tokens_are() -> None:
    """A number for each token and sample, cut like the tokens of Megatron's batches."""
    samples = [torch.arange(7).view(7, 1, 1) + 100, torch.arange(5).view(5, 1, 1) + 200]
    batch = padded(samples, 8)
    assert batch[:, :, 0, 0].tolist() == [[*range(100, 107), -1], [*range(200, 205), -1, -1, -1]]
    left = padded(samples, 8, starts=[1, 3])
    assert left[:, :, 0, 0].tolist() == [[-1, *range(100, 107)], [-1, -1, -1, *range(200, 205)]]
    assert torch.equal(tokens_of_rank(batch).view(2, 8), batch[:, :, 0, 0])
    assert torch.equal(tokens_of_rank(batch, sequence_first=True).view(8, 2).T, batch[:, :, 0, 0])
    for rank, places in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
        got = tokens_of_rank(batch, context=(rank, 2))
        assert torch.equal(got.view(2, 4), batch[:, places, 0, 0])
        for part in range(2):
            got = tokens_of_rank(batch, context=(rank, 2), sequence=(part, 2), sequence_first=True)
            assert torch.equal(got.view(2, 2).T, batch[:, places[2 * part:2 * part + 2], 0, 0])
    row = packed(samples, [8, 8])
    assert torch.equal(row.view(2, 8), batch[:, :, 0, 0])
    got = tokens_of_rank(row, context=(0, 2), lengths=[8, 8])
    assert torch.equal(got.view(2, 4), batch[:, [0, 1, 6, 7], 0, 0])


def test_layers_are_named_where_an_engine_counts_others() -> None:
    model, ids_TLK = Model(layers=2), choices(5, 4)
    with replay_rollouts(model, ids_TLK, [1, 3]):
        model(torch.randn(5, DIM, dtype=torch.float64))
    assert torch.equal(torch.stack(model.chosen, 1), ids_TLK[:, [1, 3]])


@pytest.mark.parametrize(("changes", "ids", "said"), [
    ({}, choices(5, 2), "routed experts have 2 layers, but this model has 3 layers"),
    ({}, choices(4), "A layer processes 5 tokens with 2 experts each, but the routed experts"),
    ({"top_k": 3}, choices(5), "processes 5 tokens with 3 experts each"),
    ({}, choices(5) + 1, r"routed experts are in \d\.\.6, but must be in -1\.\.5"),
    ({}, torch.zeros_like(choices(5)), "the same expert twice"),
    ({"name": "sinkhorn"}, choices(5), "SinkhornRouter cannot be used with replay_rollouts"),
    ({"force": "balance"}, choices(5), "force='balance' cannot be combined with replay_rollouts"),
])
def test_what_does_not_fit_is_refused(changes: dict[str, Any], ids: Tensor, said: str) -> None:
    model = Model(**changes)
    with pytest.raises(ValueError, match=said), replay_rollouts(model, ids):
        model(torch.randn(5, DIM, dtype=torch.float64))
    assert changes or all(layer.router.forced is None for layer in model.layers)


@pytest.mark.parametrize(("call", "said"), [
    (lambda: rollout("AAAA"), "base64 need layers and top_k, but layers=None"),
    (lambda: rollout(base64.b64encode(bytes(20)), 2, 2), "have 5 numbers, which is not a multiple"),
    (lambda: rollout(torch.rand(3, 2, 2)), "must be integers"),
    (lambda: rollout(torch.ones(3, 2, dtype=torch.int32)), "must be integers"),
    (lambda: padded([choices(5)], 4), "5 tokens that starts at position 0 exceeds length=4"),
    (lambda: padded([choices(3), choices(3, 1)], 4), r"\[3, 2\] and \[1, 2\]. Pass"),
    (lambda: tokens_of_rank(padded([choices(5)], 6), context=(0, 2)),
     "6 tokens cannot be split into 4 equal parts"),
    (lambda: tokens_of_rank(padded([choices(5)], 5), sequence=(0, 2)),
     "5 tokens cannot be split into 2 equal parts"),
])
def test_samples_that_do_not_fit_are_refused(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_one_replay_at_a_time() -> None:
    model, ids_TLK = Model(), choices(5)
    with (replay_rollouts(model, ids_TLK), pytest.raises(ValueError, match="already"),
          replay_rollouts(model, ids_TLK)):
        pass


def test_several_routers_of_a_layer_are_refused() -> None:
    model = Model(name="topk,sigmoid_bias")
    with pytest.raises(ValueError, match="RouterSelector cannot be used with"), replay_rollouts(
            model, choices(5, 6)):
        pass
