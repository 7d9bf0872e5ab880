"""Which router of a list decides: rules, resumption, recomputation, idle parameters, losses,
agreement of ranks.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from moe_plugin import MoELayer
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import ObserveConfig, from_dict
from moe_plugin.experts.base import expert_parameters
from moe_plugin.observe import StatsRecorder
from moe_plugin.records import TokenInfo
from moe_plugin.routing import SelectionCall, finish_step, number_layers, router_selections
from moe_plugin.routing.replay import checkpoint, record_routing, replay_routing
from tests.distributed import run_gloo
from tests.seeds import seeded

# 1, 2 and 4 choices a token: a layer's load tells which one decided
NAMES = "switch,gshard,expert_choice"


def make(names: str = NAMES, losses: dict | None = None, router: dict | None = None, comm=None,
         host: HostContext = HostContext(), **choice) -> MoELayer:
    with seeded(1):
        return MoELayer(from_dict({
            "model_dim": 6, "num_experts": 4, "losses": losses or {}, "experts": {"hidden_dim": 8},
            "router": {"name": names, "selection": choice, **(router or {})}}), comm, host=host)


def who(layer: MoELayer, **info) -> str:
    return layer(torch.randn(8, 6), info=TokenInfo(**info) if info else None).stats.router


def sequence(layer: MoELayer, steps: int) -> list[str]:
    seen = []
    for _ in range(steps):
        names = {who(layer) for _ in range(2)}  # two micro-batches
        assert len(names) == 1
        seen += names
        finish_step(layer)
    return seen


def test_the_stats_name_the_router_that_decides() -> None:
    layer = make(rule="cycle")
    for name, choices in zip(NAMES.split(","), (1, 2, 4), strict=True):
        out = layer(torch.randn(8, 6))
        assert out.stats.router == name and out.stats.load_KE.shape[0] == choices
        finish_step(layer)
    assert make("switch")(torch.randn(8, 6)).stats.router is None


def test_rules_in_training_and_outside() -> None:
    a, b, c = NAMES.split(",")
    assert sequence(make(), 4) == [a] * 4
    assert sequence(make(rule="cycle"), 5) == [a, b, c, a, b]
    assert sequence(make(rule="cycle", every=2), 7) == [a, a, b, b, c, c, a]
    layer = make(rule="cycle", outside_training=2)
    sequence(layer, 1)
    assert who(layer) == b and who(layer.eval()) == c and who(layer.train()) == b
    assert who(make(rule="random").eval()) == a


def test_a_call_may_name_its_gate_under_any_rule() -> None:
    layer = make(rule="cycle")
    finish_step(layer)
    assert [who(layer, router_index=i)
            for i in range(3)] == NAMES.split(",") and who(layer, sequences=1) == "gshard"


def test_layers_by_number() -> None:
    stack = torch.nn.ModuleList(make(rule="layer") for _ in range(4))
    with pytest.raises(ValueError, match=r"but layer=None.*number_layers\(model\)"):
        who(stack[0])
    assert number_layers(stack) == 4
    a, b, c = NAMES.split(",")
    assert [who(layer) for layer in stack] == [who(layer.eval()) for layer in stack] == [a, b, c, a]


def test_random_draws_come_from_seed_step_and_layer_alone() -> None:
    torch.manual_seed(5)
    first = sequence(make(rule="random"), 30)
    torch.manual_seed(6)
    assert sequence(make(rule="random"), 30) == first and set(first) == set(NAMES.split(","))
    assert sequence(make(rule="random", seed=1), 30) != first
    stack = torch.nn.ModuleList(make(rule="random") for _ in range(2))
    number_layers(stack)
    assert sequence(stack[0], 30) == first != sequence(stack[1], 30)
    every = sequence(make(rule="random", every=5), 30)
    assert all(len(set(every[i : i + 5])) == 1 for i in range(0, 30, 5))
    # on every machine
    assert first[:8] == [
        "gshard", "gshard", "switch", "switch", "expert_choice", "gshard", "expert_choice",
        "expert_choice"
    ]


@pytest.mark.parametrize("rule", ["cycle", "random"])
def test_a_checkpoint_goes_on_in_the_sequence(rule: str) -> None:
    whole = sequence(make(rule=rule), 9)
    layer = make(rule=rule)
    begun = sequence(layer, 4)
    other = make(rule=rule)
    other.load_state_dict(layer.state_dict())
    assert begun + sequence(other, 5) == whole
    assert begun + sequence(copy.deepcopy(layer).to(torch.bfloat16).float(), 5) == whole


@pytest.mark.parametrize("router,words", [
    ({"name": "switch", "selection": {"rule": "cycle"}},
     "router.selection.rule='cycle' .*with the single router 'switch'"),
    ({"name": NAMES, "selection": {"rule": "cycle", "every": 0}},
     "router.selection.every=0 .*>= 1"),
    ({"name": NAMES, "selection": {"rule": "cycle", "outside_training": 3}},
     r"outside_training=3 .*in 0..2; router.name lists 3"),
    ({"name": NAMES, "selection": {"rule": "layer", "seed": 4}},
     "router.selection.seed=4 .*does not read it"),
    ({"name": NAMES, "selection": {"outside_training": 1}},
     "outside_training=1 .*must be 0 where router.selection.rule=first"),
    ({"name": NAMES, "selection": {"rule": "lottery"}},
     "unknown router_selection 'lottery'; known: cycle, first, layer, random"),
])
def test_settings_that_do_not_fit(router: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MoELayer(from_dict({"model_dim": 6, "router": router}))


@pytest.fixture
def own_rule(own_entries: None) -> None:
    @router_selections.register("test_warm_up")
    def warm_up(call: SelectionCall) -> int:
        """The first router for `every` steps, then the last, then one too many."""
        return min(call.period, 1) * (call.count - 1) + (call.step > 4)


def test_a_custom_rule(own_rule: None) -> None:
    layer = make(rule="test_warm_up", every=3)
    assert sequence(layer, 5) == ["switch"] * 3 + ["expert_choice"] * 2
    message = r"selection 'test_warm_up': index=3, but must be in 0..2"
    with pytest.raises(ValueError, match=message):
        who(layer)


def test_a_recomputation_takes_the_router_of_its_first_pass() -> None:
    layer = make(rule="cycle")
    x = torch.randn(8, 6, requires_grad=True)
    seen: list[str] = []

    def run(v: torch.Tensor) -> torch.Tensor:
        out = layer(v)
        seen.append(out.stats.router)
        return out.output

    late = [checkpoint(run, x).sum()]
    late += [torch.utils.checkpoint.checkpoint(run, x, use_reentrant=True).sum() for _ in range(2)]
    finish_step(layer)  # even where a step is said to be over too early
    sum(late).backward()
    # torch may stop a recomputation before its last line
    assert len(seen) >= 5 and set(seen) == {"switch"} and who(layer) == "gshard"


def test_replay_takes_the_recorded_router_in_another_step() -> None:
    layer, x = make(rule="cycle"), torch.randn(8, 6)
    finish_step(layer)
    with record_routing() as tape:
        first = layer(x).stats
    finish_step(layer)
    with replay_routing(tape):
        again = layer(x).stats
    assert first.router == again.router == "gshard" and torch.equal(first.load_KE, again.load_KE)


def test_gradients_are_those_of_the_router_alone_and_idle_ones_are_zero() -> None:
    layer, x = make(rule="cycle"), torch.randn(8, 6)
    # an idle router's values reach nothing
    layer.router.routers[0].weight_ED.data[0, 0] = float("nan")
    for index, name in list(enumerate(NAMES.split(",")))[1:]:
        finish_step(layer)
        alone = make(name)
        alone.experts.load_state_dict(layer.experts.state_dict())
        alone.router.load_state_dict(layer.router.routers[index].state_dict())
        results = []
        for each in (layer, alone):
            each.zero_grad(set_to_none=True)
            torch.manual_seed(3)
            each(x).output.square().sum().backward()
            results.append([p.grad for p in each.experts.parameters()])
        results[0].append(layer.router.routers[index].weight_ED.grad)
        results[1].append(alone.router.weight_ED.grad)
        assert all(torch.equal(a, b)
                   for a, b in zip(*results, strict=True)) and results[0][-1].abs().sum() > 0
        idle = [router for i, router in enumerate(layer.router.routers) if i != index]
        assert all((router.weight_ED.grad == 0).all() for router in idle)


def test_losses_of_one_router_alone_are_absent_where_another_decides() -> None:
    layer = make("noisy_topk,gshard,topk",
                 {"noisy_load": 0.1, "load_importance": 0.1, "switch": 0.1}, {"noise": 1.0},
                 rule="cycle")
    seen = []
    for _ in range(3):
        seen.append(set(layer(torch.randn(8, 6)).losses))
        finish_step(layer)
    assert seen == [{"noisy_load", "switch"}, {"load_importance", "switch"},
                    {"load_importance", "switch"}]
    with pytest.raises(ValueError, match="losses.noisy_load cannot be used with "):
        make("switch,gshard", {"noisy_load": 0.1})


def test_records_count_the_gates_and_average_a_loss_over_its_own_calls() -> None:
    layer = make("noisy_topk,switch", {"noisy_load": 0.1}, rule="cycle")
    recorder, values = StatsRecorder(ObserveConfig()), []
    for _ in range(3):
        stats = layer(torch.randn(8, 6)).stats
        recorder.add("layer", stats)
        values += stats.losses.values()
        finish_step(layer)
    record = recorder.reduce()["layer"]
    assert record["routers"] == {"noisy_topk": 2, "switch": 1} and record["calls"] == 3
    assert len(values) == 2 and record["losses"]["noisy_load"] == pytest.approx(
        float(sum(values)) / 2)


def _train_under_ddp() -> list[tuple[str, float]]:
    from moe_plugin.comm import default_comm

    model = torch.nn.Sequential(
        torch.nn.Linear(6, 6),
        make("switch,base,expert_choice", {"switch": 0.01}, rule="random", comm=default_comm(30.0)))
    layer = model[1]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, list(expert_parameters(model)))
    wrapped = DistributedDataParallel(model)  # no find_unused_parameters
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(8):
        torch.manual_seed(step * 2 + layer.comm.rank)
        out = wrapped(torch.randn(8, 6))
        (out.output.square().mean() + sum(out.losses.values())).backward()
        optimizer.step()
        optimizer.zero_grad()
        finish_step(model)
        seen.append((out.stats.router, float(sum(p.sum() for p in layer.router.parameters()))))
    return seen


@pytest.mark.distributed
def test_ranks_take_the_same_gates_and_ddp_does_not_wait_for_idle_ones() -> None:
    one, two = run_gloo(2, _train_under_ddp)
    assert one == two and {router for router, _ in one} == {"switch", "base", "expert_choice"}
