"""Megatron's `RouterReplay` drives our router: choices recorded, replayed and recomputed, compared
with a dense computation and with Megatron's own layer. Whole runs are in `test_megatron_layouts`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hosts.megatron.layers import (
    BATCH,
    EXPERTS,
    SEQUENCE,
    Case,
    D,
    Weights,
    build,
    draw,
    initialise_parallel,
    whole_gradients,
)
from tests.hosts.megatron.ranks import on_ranks

pytest.importorskip("megatron.core.transformer.moe.router_replay", reason="from 0.16 on")

TOKENS, K = SEQUENCE * BATCH, 2
REPLAY = {"moe_enable_routing_replay": True}
# as in Megatron, the balance loss counts the choices that the router would have made itself
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def choices(seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(TOKENS, EXPERTS, generator=g).topk(K).indices


def tokens(seed: int) -> Tensor:
    return torch.randn(SEQUENCE, BATCH, D, generator=torch.Generator().manual_seed(seed))


def dense(w: Weights, x_SBD: Tensor, ids_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output for these choices, or for the best ones; and the choices."""
    x_TD = x_SBD.reshape(-1, D)
    logits_TE = x_TD @ w.router.T
    ids_TK = logits_TE.topk(K).indices if ids_TK is None else ids_TK
    p_TK = torch.softmax(logits_TE.gather(1, ids_TK), 1)
    rows = [sum(p * (torch.nn.functional.gelu(x_D @ w.w_in[e]) @ w.w_out[e])
                for e, p in zip(ids, weights, strict=True))
            for x_D, ids, weights in zip(x_TD, ids_TK.tolist(), p_TK, strict=True)]
    return torch.stack(rows).view_as(x_SBD), ids_TK


def made(case: Case, ours: bool = True) -> tuple[Any, Any, Any]:
    """(layer, `RouterReplay`, its actions)."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    return build(case, ours), RouterReplay, RouterReplayAction


def _recorded_and_replayed(case: Case) -> None:
    initialise_parallel(case)
    layer, replay, action = made(case)
    assert replay.global_router_replay_instances == [layer.router.router_replay]
    assert layer.router.router_replay.layer_number == 1
    x = tokens(1)
    plain, own_TK = layer(x)[0], dense(draw(case), x)[1]

    replay.set_global_router_replay_action(action.RECORD)
    assert torch.equal(layer(x)[0], plain)
    [recorded_TK] = replay.get_recorded_data()
    assert torch.equal(recorded_TK, own_TK)
    buffer = torch.full((TOKENS + 3, 1, K), 7)
    replay.set_global_static_buffers(buffer)
    layer.eval()(x)
    assert torch.equal(buffer[:TOKENS, 0], own_TK) and bool((buffer[TOKENS:] == 7).all())
    replay.clear_global_static_buffers()

    replay.set_replay_data([recorded_TK])
    replay.set_global_router_replay_action(action.REPLAY_FORWARD)
    assert torch.equal(layer(x)[0], plain)
    ids_TK = choices(2)
    replay.set_replay_data([ids_TK.int()])
    for training in (True, False):
        torch.testing.assert_close(layer.train(training)(x)[0], dense(draw(case), x, ids_TK)[0])
    # the router chooses for tokens without a choice; verl fills them with zeros
    ids_TK[3], ids_TK[5], ids_TK[7] = -1, 0, torch.tensor([1, -1])
    replay.set_replay_data([ids_TK])
    ids_TK = ids_TK.index_copy(0, torch.tensor([3, 5, 7]), own_TK[[3, 5, 7]])
    torch.testing.assert_close(layer(x)[0], dense(draw(case), x, ids_TK)[0])
    replay.clear_global_router_replay_action()
    assert torch.equal(layer(x)[0], plain)
    # a run that changes its number of ranks builds new routers
    layer.moe.router = build(Case(), True).moe.router
    layer.follow_groups(layer.groups)
    replay.set_global_router_replay_action(action.REPLAY_FORWARD)
    torch.testing.assert_close(layer(x)[0], dense(draw(case), x, ids_TK)[0])


def test_choices_are_recorded_and_replayed() -> None:
    on_ranks(1, _recorded_and_replayed, Case(native=REPLAY))


def _backward(case: Case) -> None:
    """One forward pass, one backward pass: three micro-batches, two of them in flight."""
    initialise_parallel(case)
    recomputed, found = "recompute_granularity" in case.native, []
    for ours in (False, True):
        layer, replay, action = made(case, ours)
        inputs = [tokens(n).requires_grad_() for n in range(3)]
        losses: list[Tensor] = []

        def forward(n: int, layer: Any = layer, replay: Any = replay, action: Any = action,
                    losses: list[Tensor] = losses, inputs: list[Tensor] = inputs) -> None:
            replay.set_replay_data([choices(10 + n)])
            replay.set_global_router_replay_action(action.REPLAY_FORWARD)
            losses.append(layer(inputs[n])[0].square().sum())
            replay.set_global_router_replay_action(action.REPLAY_BACKWARD)

        forward(0)
        forward(1)
        losses[0].backward()
        forward(2)
        losses[1].backward()
        losses[2].backward()
        left = layer.router.router_replay.replay_backward_list
        assert len(left) == (0 if recomputed else 3)
        whole = whole_gradients(layer, case)
        found.append([*(x.grad for x in inputs), whole.router, whole.w_in, whole.w_out])
    weights = draw(case)
    for whole in (weights.router, weights.w_in, weights.w_out):
        whole.requires_grad_()
    inputs = [tokens(n).requires_grad_() for n in range(3)]
    for n, x in enumerate(inputs):
        dense(weights, x, choices(10 + n))[0].square().sum().backward()
    wanted = [*(x.grad for x in inputs), weights.router.grad, weights.w_in.grad, weights.w_out.grad]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    if "moe_aux_loss_coeff" not in case.native:
        torch.testing.assert_close(found[1], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [{}, RECOMPUTED, {**RECOMPUTED, **AUX}],
                         ids=["stored", "recomputed", "recomputed, with a balance loss"])
def test_gradients_are_those_of_the_replayed_choices(more: dict[str, Any]) -> None:
    on_ranks(1, _backward, Case(native={**REPLAY, **more}))


def _mismatches(case: Case) -> None:
    from moe_plugin.routing.rollouts import replay_rollouts

    initialise_parallel(case)
    layer, replay, action = made(case)
    x = tokens(1)
    for name in (action.REPLAY_FORWARD, action.REPLAY_BACKWARD):
        replay.set_global_router_replay_action(name)
        with pytest.raises(ValueError, match=f"is {name.value}, but this router has no choices"):
            layer(x)
    replay.set_global_router_replay_action(action.REPLAY_FORWARD)
    for ids_TK, said in ((choices(1)[1:], "processes 24 tokens .* use set_replay_data"),
                         (choices(1) + 1, r"are in \d\.\.4, but must be in -1\.\.3")):
        replay.set_replay_data([ids_TK])
        with pytest.raises(ValueError, match=said):
            layer(x)
    with pytest.raises(ValueError, match="already being replayed"), replay_rollouts(
            layer, choices(1)[:, None]):
        pass


def test_what_does_not_match_is_an_error() -> None:
    on_ranks(1, _mismatches, Case(native=REPLAY))


@pytest.mark.parametrize(("case", "settings", "said"), [
    (Case(tp=2, native=REPLAY), {}, "tensor parallelism without sequence parallelism"),
    (Case(native=REPLAY), {"router.name": "sinkhorn"}, "SinkhornRouter cannot be used with"),
    (Case(native=REPLAY), {"router.force": "balance"}, "force='balance' cannot be combined"),
])
def test_what_cannot_be_replayed_is_refused(case: Case, settings: dict[str, Any],
                                            said: str) -> None:
    on_ranks(case.tp, _refused, case, settings, said)


def _refused(case: Case, settings: dict[str, Any], said: str) -> None:
    initialise_parallel(case)
    with pytest.raises(ValueError, match=said):
        build(case, True, settings)


class OfVerl:
    """What verl's own class has, and this test needs."""

    router_instances: list[Any] = []

    def __init__(self) -> None:
        self.target_topk_idx, self.target_replay_mask = None, None
        self.replay_backward_list: list[Any] = []
        self.replay_backward_mask_list: list[Any] = []
        self.router_replay_action: Any = None
        self.router_instances.append(self)

    def set_target_indices(self, topk_indices: Tensor, replay_mask: Tensor | None = None) -> None:
        self.target_topk_idx, self.target_replay_mask = topk_indices, replay_mask
        self.replay_backward_list.append(topk_indices)
        self.replay_backward_mask_list.append(replay_mask)


def _driven_by_verl(case: Case) -> None:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action
    from megatron.core.transformer.transformer_config import TransformerConfig

    initialise_parallel(case)
    module: Any = ModuleType("router_replay_patch")
    module.RouterReplay = OfVerl
    sys.modules["verl.utils.megatron.router_replay_patch"] = module
    TopKRouter._router_replay_patched = True
    TransformerConfig.enable_routing_replay = True
    layer, x = build(case, True), tokens(1)
    own, own_TK = dense(draw(case), x)
    [one] = OfVerl.router_instances
    # it looks for modules of Megatron's class, which must not disturb Megatron
    [found] = [part for part in layer.modules() if isinstance(part, TopKRouter)]
    assert found.router_replay is one and found.layer_number == 1
    found.reset_global_aux_loss_tracker()
    assert "handle" not in str([*layer.state_dict(), *layer.sharded_state_dict()])

    one.router_replay_action = Action.REPLAY_FORWARD  # without choices, as of later predictions
    torch.testing.assert_close(layer(x)[0], own)
    mask_T = torch.arange(TOKENS) % 3 > 0
    one.set_target_indices(choices(4), mask_T)
    chosen_TK = torch.where(mask_T[:, None], choices(4), own_TK)
    torch.testing.assert_close(layer(x)[0], dense(draw(case), x, chosen_TK)[0])
    one.set_target_indices(choices(5))
    torch.testing.assert_close(layer(x)[0], dense(draw(case), x, choices(5))[0])
    one.router_replay_action = Action.REPLAY_BACKWARD
    for ids_TK in (chosen_TK, choices(5), own_TK):
        torch.testing.assert_close(layer(x)[0], dense(draw(case), x, ids_TK)[0])
    assert one.replay_backward_list == one.replay_backward_mask_list == []


def test_verls_own_class_is_followed() -> None:
    on_ranks(1, _driven_by_verl, Case())
