"""Routers with a rule of their own, in one pass: what their single steps give, in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.comm import Topology, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.kernels import top_k_stable
from moe_plugin.records import Routing
from moe_plugin.routing import build_router, losses, routers
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.replay import checkpoint, record_routing, replay_routing
from moe_plugin.routing.routers.base import Router

pytestmark = pytest.mark.fast

TOKENS, WIDTH, EXPERTS = 40, 5, 8
SUMS = {"gshard": 1.0, "switch": 1.0, "importance": 1.0, "global_batch": 1.0, "z": 1.0}
LOSSES = {
    "noisy_topk": {"none": {}, "z": {"z": 1.0}, "sums": SUMS,
                   "load": {"importance": 1.0, "noisy_load": 1.0}},
    "ktop1": {"none": {}, "z": {"z": 1.0}, "sums": SUMS},
    "topology_quota": {"none": {}, "sums": SUMS},
}
CASES = [(name, which, k) for name, sets in LOSSES.items() for which in sets for k in (1, 2, 8)]


def make(name: str, losses_: dict[str, float], k: int, one_pass: bool = True,
         **settings: Any) -> Router:
    """With weights of small whole numbers, so that tokens of such numbers have ties.

    noisy_topk takes k=1 in single calls alone.
    """
    configured = max(k, 2) if name == "noisy_topk" else k
    router = routers.get(name)(from_dict({
        "model_dim": WIDTH, "num_experts": EXPERTS, "losses": losses_,
        "router": {"name": name, "top_k": configured, **settings}})).double()
    g = torch.Generator().manual_seed(k)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=g))
    assert router.one_pass()
    if not one_pass:
        router.one_pass = lambda: False
    return router


def tokens(count: int = TOKENS) -> Tensor:
    x_TD = torch.randint(-1, 2, (count, WIDTH), generator=torch.Generator().manual_seed(5))
    return x_TD.double().requires_grad_()


def padding(masked: bool) -> Tensor | None:
    return torch.arange(TOKENS) % 5 > 0 if masked else None


def objective(routing: Routing) -> Tensor:
    by_choice_K = torch.arange(1.0, routing.weights_TK.shape[1] + 1, dtype=torch.float64)
    return (routing.weights_TK.square() * by_choice_K).sum() + sum(routing.losses.values())


def fields(routing: Routing) -> dict[str, Any]:
    """What a routing records, by name."""
    found = {f.name: getattr(routing, f.name) for f in dataclasses.fields(routing)}
    counted, lost = found.pop("counted"), found.pop("losses")
    return found | {"load_KE": counted.load_KE} | {f"loss {n}": v for n, v in lost.items()}


def assert_same(one: dict[str, Any], single: dict[str, Any]) -> None:
    assert one.keys() == single.keys()
    for name, value in one.items():
        other = single[name]
        # where no slot depends on it
        if name == "priority_T" and (value is None or other is None):
            continue
        if isinstance(value, Tensor):
            # second derivatives of an infinite margin (noisy_load, k = E) are NaN
            torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12, equal_nan=True,
                                       msg=lambda m, name=name: f"{name}: {m}")
        else:
            assert value == other, name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name,which,k", CASES)
def test_values_and_both_derivatives(name: str, which: str, k: int, masked: bool,
                                     training: bool) -> None:
    found = []
    for one_pass in (True, False):
        router, x_TD = make(name, LOSSES[name][which], k, one_pass).train(training), tokens()
        torch.manual_seed(4)
        routing = router(x_TD, padding(masked), k)
        inputs = [x_TD, *router.parameters()]
        first = torch.autograd.grad(objective(routing), inputs, create_graph=True,
                                    allow_unused=True, materialize_grads=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs,
                                     allow_unused=True, materialize_grads=True)
        found.append(fields(routing) | {f"gradient {i}": grad for i, grad in enumerate(first)}
                     | {f"second derivative {i}": grad for i, grad in enumerate(second)})
    assert_same(*found)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("real", [0, 1])
def test_few_tokens(name: str, real: int) -> None:
    """None at all, one, and padding with none or one."""
    for count, mask_T in ((0, None), (real, None), (3, torch.arange(3) < real)):
        found = []
        for one_pass in (True, False):
            router, x_TD = make(name, SUMS, 2, one_pass), tokens(count)
            torch.manual_seed(4)
            routing = router(x_TD, mask_T)
            grads = torch.autograd.grad(objective(routing), [x_TD, router.weight_ED])
            found.append(fields(routing) | {f"gradient {i}": g for i, g in enumerate(grads)})
        assert_same(*found)


@pytest.mark.parametrize("name", LOSSES)
def test_ties_go_to_the_lower_expert(name: str) -> None:
    router = make(name, {}, 2).eval()
    with torch.no_grad():
        router.weight_ED.zero_()
    first, second = (0, EXPERTS // 2) if name == "ktop1" else (0, 1)
    assert (router(tokens()).ids_TK == torch.tensor([first, second])).all()


def test_noisy_topk_tells_logits_apart_that_a_softmax_does_not() -> None:
    """Far below the best one all scores are 0."""
    router = make("noisy_topk", {}, 2).float().eval()
    with torch.no_grad():
        router.weight_ED.zero_()
        router.weight_ED[:, 0] = torch.tensor([-400.0, -300.0, -200.0, 0, -500, -500, -500, -500])
    x_TD = torch.ones(3, WIDTH)
    assert router(x_TD).ids_TK.tolist() == [[3, 2]] * 3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_other_choices_than_the_best_ones(name: str, masked: bool) -> None:
    """Replayed after the weights have moved, and of a token that has lost one on another node."""
    tape, found = None, []
    for one_pass in (False, True):
        router, x_TD = make(name, SUMS, 2, one_pass, batch_prioritized=True), tokens()
        torch.manual_seed(4)
        if tape is None:
            with record_routing() as tape:
                router(x_TD, padding(masked))
            if name == "topology_quota":
                tape.ids[0] = tape.ids[0].clone()
                tape.ids[0][3, 1] = tape.ids[0][7, 0] = tape.ids[0][9, :] = -1
        with torch.no_grad():
            router.weight_ED.mul_(-1.5)
        with replay_routing(tape):
            routing = router(x_TD, padding(masked))
        grads = torch.autograd.grad(objective(routing), [x_TD, *router.parameters()])
        found.append(fields(routing) | {f"gradient {i}": g for i, g in enumerate(grads)})
    assert_same(*found)


@pytest.mark.parametrize("name", LOSSES)
def test_a_recomputation_keeps_what_the_first_pass_kept(name: str) -> None:
    """And slots go to the same tokens: priorities are equal bit by bit."""
    router, x_TD, seen = make(name, SUMS, 2, batch_prioritized=True), tokens(), []

    def run(x_TD: Tensor) -> Tensor:
        seen.append(router(x_TD))
        return objective(seen[-1])

    checkpoint(run, x_TD).backward()
    assert len(seen) == 2 and torch.equal(seen[0].ids_TK, seen[1].ids_TK)
    assert torch.equal(seen[0].priority_T, seen[1].priority_T)


@pytest.mark.parametrize("name", ["noisy_topk", "ktop1"])
def test_a_loss_that_reads_single_scores_gets_them(name: str, own_entries: None) -> None:
    @losses.register("test_single_scores")
    def own(x: RoutingCall) -> Tensor:
        """The largest score, and the margin where there is one."""
        margin = 0.0 if x.margin_TE is None else x.margin_TE.sum()
        return x.probs_TE.amax() + margin

    values = []
    for one_pass in (True, False):
        torch.manual_seed(4)
        routing = make(name, {"test_single_scores": 1.0}, 2, one_pass)(tokens())
        values.append(routing.losses["test_single_scores"])
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)
    if name == "ktop1":
        assert 0 < values[0] <= 1
    else:
        assert values[0].isfinite() and values[0] != 1


def test_topology_quota_routes_in_one_pass_on_one_node_alone() -> None:
    config = from_dict({"model_dim": WIDTH, "num_experts": EXPERTS,
                        "router": {"name": "topology_quota"}})

    def fuses(comm: Any) -> bool:
        return build_router(config, comm).one_pass()

    assert run_simulated(2, fuses, topology=Topology.uniform(2, 2)) == [True, True]
    assert run_simulated(2, fuses, topology=Topology.uniform(2, 1)) == [False, False]


@pytest.mark.parametrize("k,training", [(1, True), (7, True), (8, True), (2, False)])
def test_margin_is_that_of_a_second_choice_of_k_plus_one(k: int, training: bool) -> None:
    """And the choice is the k best."""
    router = make("noisy_topk", {"noisy_load": 1.0}, k).train(training)
    torch.manual_seed(4)
    routing = router(tokens(), top_k=k)
    torch.manual_seed(4)
    noisy_TE = router.scores(tokens(), RoutingCall(k=k))
    assert torch.equal(routing.ids_TK, top_k_stable(noisy_TE.detach(), k))
    assert set(routing.losses) == ({"noisy_load"} if training else set())
