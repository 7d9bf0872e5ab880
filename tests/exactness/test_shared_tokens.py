"""Ranks that hold the same tokens: index-slice dispatch (PPMoE) and Parm's schedules against the
dense reference; shadowing.

The reference sees each group's tokens once. Every rank of a group must get the same output, input
gradient, losses and router gradient, all of them whole, and its experts' gradients over all groups'
tokens, each counted once.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Traffic, run_simulated
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts import expert_kinds, strategies
from moe_plugin.planner.choice import legal_choices
from tests.distributed import run_gloo
from tests.exactness.harness import (
    NAMES,
    RankResult,
    compare,
    config_of,
    load,
    reference,
    run_rank,
    slice_of,
)
from tests.exactness.test_layouts import TOKENS, with_layout
from tests.oracle import Case, make_inputs, make_parameters, objective

SAME_TOKENS = [
    name for name in dispatchers.names() if dispatchers.get(name).traits.shares_tokens
]


def run_shared(case: Case, comm: Comm, config: MoEConfig, replicas: int) -> RankResult:
    """One rank: the tokens of its group, in a case whose `world` counts groups."""
    layer = MoELayer(config, comm, dtype=torch.float64)
    whole = dataclasses.replace(case, world=comm.size)
    load(layer, make_parameters(case), whole)
    xs, masks = make_inputs(case)
    group = comm.rank // replicas
    x = xs[group].clone().requires_grad_()
    out = layer(x, masks[group])
    objective(out.output, out.losses, group).backward()
    grads = {"router": layer.router.weight_ED.grad}
    grads |= {
        name: p.grad for name, (attribute, _) in NAMES.items()
        if (p := getattr(layer.experts, attribute, None)) is not None
    }
    return RankResult(out.output.detach(), {n: v.detach() for n, v in out.losses.items()}, x.grad,
                      grads, out.stats.as_dict())


def check_shared(case: Case, world: int, config: MoEConfig, drops: bool = True) -> None:
    """Hold all ranks of `world` to the reference of `case`, whose ranks are groups of world /
    case.world ranks with the same tokens.
    """
    replicas = world // case.world
    results = run_simulated(world, lambda comm: run_shared(case, comm, config, replicas))
    answer, whole = reference(case), dataclasses.replace(case, world=world)
    for rank, result in enumerate(results):
        group = rank // replicas
        torch.testing.assert_close(result.output, answer.outputs[group], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(result.input_grad, answer.input_grads[group], rtol=1e-9,
                                   atol=1e-9)
        for name, loss in result.losses.items():
            torch.testing.assert_close(loss, answer.losses[group][name], rtol=1e-9, atol=1e-9,
                                       msg=lambda m, name=name: f"{name}: {m}")
        if drops:
            assert result.stats["dropped"] == answer.dropped[group]
        for name, grad in result.grads.items():
            if name != "router":
                torch.testing.assert_close(grad, slice_of(name, answer.grads[name], whole, rank),
                                           rtol=1e-9, atol=1e-8)
    one_of_each = [results[group * replicas] for group in range(case.world)]
    torch.testing.assert_close(sum(r.grads["router"] for r in one_of_each), answer.grads["router"],
                               rtol=1e-9, atol=1e-8)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result.grads["router"],
                                   results[rank // replicas * replicas].grads["router"], rtol=1e-12,
                                   atol=1e-12)


@pytest.mark.parametrize("dispatch", SAME_TOKENS)
@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("factor", [None, 0.6, 0.0, -1.0])
def test_one_group(dispatch: str, world: int, factor: float | None) -> None:
    for experts, tokens, masked in itertools.product([1, 2, 8], [7, 0], [None, [2]]):
        case = Case(1, experts, min(2, experts), [tokens], masked and [min(2, tokens)], factor,
                    seed=experts)
        check_shared(case, world, config_of(case, dispatch__name=dispatch))


@pytest.mark.parametrize("dispatch", SAME_TOKENS)
@pytest.mark.parametrize("kind", expert_kinds.names())
@pytest.mark.parametrize("compute", strategies.names())
def test_one_group_with_every_kind_and_kernel(dispatch: str, kind: str, compute: str) -> None:
    for world, experts, bias in [(2, 4, True), (4, 2, True), (4, 4, False)]:
        for shards in (None, 2):
            case = Case(1, experts, 2, [6], None, None, kind, bias=bias, shards=shards)
            check_shared(case, world,
                         config_of(case, dispatch__name=dispatch, experts__compute=compute))


@pytest.mark.parametrize("world,replicas", [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4)])
@pytest.mark.parametrize("schedule,dispatch,factor", [("s1", "ragged", None), ("s1", "padded", 0.0),
                                                      ("s2", "padded", 0.0), ("s2", "padded", 0.6),
                                                      ("s2", "padded", -1.0),
                                                      ("s2", "parm_s2", 1.0)])
@pytest.mark.parametrize("kind", expert_kinds.names())
def test_parm(world: int, replicas: int, schedule: str, dispatch: str, factor: float | None,
              kind: str) -> None:
    for experts in (1, 2, 8):
        groups = world // replicas
        case = Case(groups, experts, min(2, experts), [7, 5, 0, 3][:groups], [1, 0, 0, 3][:groups],
                    factor, kind)
        config = config_of(case, dispatch__name=dispatch)
        config.losses = {"switch": 1.0, "z": 1.0, "gshard": 1.0}
        config.parallel.replicas, config.parallel.schedule = replicas, schedule
        check_shared(case, world, config)
        if experts == 8 and world > 2:  # shards of two experts or more on every rank
            check_shared(
                dataclasses.replace(case, shards=2), world,
                dataclasses.replace(config, parallel=dataclasses.replace(config.parallel,
                                                                         shards=2)))


def test_parm_s1_in_every_layout() -> None:
    case = Case(2, 2, 2, [7, 6], None, 0.0)
    for dispatch, choice in itertools.product(["ragged", "padded"],
                                              legal_choices(2, 8, degrees=(1, 2))):
        config = with_layout(config_of(case, dispatch__name=dispatch), choice)
        config.parallel.replicas = 4
        config.parallel.schedule = "s1"
        check_shared(case, 8, config)


def _traffic(world: int, config: MoEConfig, tokens: int) -> Traffic:
    traffic = Traffic()

    def rank(comm: Comm) -> None:
        layer = MoELayer(config, comm, dtype=torch.float64)
        comm.barrier()
        traffic.bytes.clear()
        traffic.collectives.clear()
        comm.barrier()
        x = torch.randn(tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1),
                        requires_grad=True)
        y = layer(x).output
        comm.barrier()
        if comm.rank == 0:
            traffic.collectives["forward"] = dict(traffic.collectives)
        comm.barrier()
        y.sum().backward()

    run_simulated(world, rank, traffic=traffic)
    return traffic


@pytest.mark.parametrize("factor", [None, 1.0, 0.0, -1.0])
def test_index_slice_is_one_all_reduce_a_direction_and_nothing_else(factor: float | None) -> None:
    for world, experts in [(2, 8), (4, 4), (4, 2)]:
        case = Case(1, experts, 2, [6], None, factor)
        found = _traffic(world, config_of(case, dispatch__name="index_slice"), 6).collectives
        forward = found.pop("forward")
        forward.pop("barrier"), found.pop("barrier")
        assert forward == {"all_reduce": 1} and found == {"all_reduce": 2}


def test_all_gather_dispatch_is_a_gather_and_a_scatter_a_direction() -> None:
    """Forward also the number of the longest rank's tokens. Bytes of ring collectives; 2K: gate
    weights (float64) and ids (int64) of K choices.
    """
    tokens, top_k, width = 6, 2, 8
    for world, experts in [(2, 8), (4, 4), (4, 2)]:
        config = config_of(Case(1, experts, top_k, [tokens], None), dispatch__name="all_gather")
        config.losses = {}
        traffic = _traffic(world, config, tokens)
        forward = traffic.collectives.pop("forward")
        # the ids first, so that sizes are known; then tokens and gate weights
        assert {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1
                }.items() <= forward.items() and "all_to_all" not in forward
        assert (traffic.collectives["all_gather"], traffic.collectives["reduce_scatter"]) == (3, 2)
        gathered = tokens * 8 * (width + 2 * top_k) + tokens * 8 * width
        scattered = tokens * 8 * width + tokens * 8 * (width + top_k)
        number = 2 * 8 * (world - 1) // world if world > 2 else 8
        assert sum(traffic.bytes.values()) == pytest.approx(
            world * ((world - 1) * (gathered + scattered) + number), abs=world * 16)


def test_parm_bytes_follow_the_formulas() -> None:
    """S1: 2 A2A(ETM N_ESP / N_MP) + AG(BLM); S2: the same all-to-alls + AG(ETM); twice, for
    backward.
    """
    world, replicas, experts, tokens = 8, 4, 2, 16
    shards, row = world // experts, 8 * 8
    for schedule in ("s1", "s2"):
        case = Case(1, experts, 2, [tokens], None, 1.0, bias=False)
        config = config_of(case, dispatch__name="padded", dispatch__equal_tokens=True)
        config.parallel.replicas, config.parallel.schedule, config.losses = replicas, schedule, {}
        slots = 2 * tokens  # ET = k f BL
        rows = slots * shards // replicas * row * (world - 1) / world
        gathered = (tokens if schedule == "s1" else slots * shards) // replicas * row * (replicas -
                                                                                         1)
        found = sum(_traffic(world, config, tokens).bytes.values())
        assert found == world * 2 * (2 * rows + gathered), schedule


@pytest.mark.parametrize("settings,words", [({
    "replicas": 3
}, "parallel.replicas=3 does not fit 4 expert-parallel ranks: must be a divisor; the nearest is 2"),
                                            ({"replicas": 2, "schedule": "s2"
                                              }, "parallel.schedule='s2' shares slots"),])
def test_what_does_not_fit(settings: dict, words: str) -> None:
    config = config_of(Case(4, 4, 2, [1] * 4))
    for name, value in settings.items():
        setattr(config.parallel, name, value)
    with pytest.raises(ValueError, match=words):
        run_simulated(4, lambda comm: MoELayer(config, comm))


@pytest.mark.parametrize("dispatch,factor", [("ragged", None), ("ragged", 0.6), ("padded", 0.6)])
def test_every_shadow_set_gives_the_same_numbers(dispatch: str, factor: float | None,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_plugin.tuning.shadows import Shadows

    for world, experts, shards in [(2, 4, None), (4, 2, None), (4, 4, None), (4, 4, 2)]:
        case = Case(world, experts, 2, TOKENS[:world], None, factor,
                    kind="gated_ffn" if experts == 2 else "ffn", shards=shards)
        config, answer = config_of(case, dispatch__name=dispatch), reference(case)
        config.parallel.shadow = experts
        config.parallel.d = 2
        for bits in range(2**experts):
            chosen = tuple(e for e in range(experts) if bits >> e & 1)
            monkeypatch.setattr(Shadows, "select",
                                lambda self, routing, training, chosen=chosen: chosen)
            compare(case, run_simulated(world, lambda comm: run_rank(case, comm, config)), answer)


def test_a_hot_expert_is_shadowed_and_its_tokens_stay() -> None:
    case = Case(4, 8, 1, [64] * 4, None, None, skew=3.0, width=8, hidden=8)
    config = config_of(case)
    config.parallel.shadow = 2

    def rank(comm: Comm) -> tuple:
        layer = MoELayer(config, comm, dtype=torch.float64)
        layer.layouts.shadows.model = dataclasses.replace(layer.layouts.shadows.model, flops=1e9,
                                                          bytes_s=1e9)
        load(layer, make_parameters(case), case)
        x = make_inputs(case)[0][comm.rank]
        first = layer(x).stats
        return layer.layouts.shadows.current, int(first.load_KE[0, 0]), first.rows

    for current, tokens, rows in run_simulated(4, rank):
        # its own tokens for expert 0, not everybody's
        assert current[0] == 0 and rows >= tokens > 32


def _run_shared_over_processes() -> list[RankResult]:
    from moe_plugin import TorchComm

    comm, found = TorchComm(), []
    for dispatch, schedule, factor in [("index_slice", "auto", None), ("padded", "s1", 0.0),
                                       ("padded", "s2", 0.6)]:
        case = Case(1, 2, 2, [7], [2], factor)
        config = config_of(case, dispatch__name=dispatch)
        config.parallel.replicas, config.parallel.schedule = comm.size, schedule
        found.append(run_shared(case, comm, config, comm.size))
    return found


@pytest.mark.distributed
def test_over_processes() -> None:
    results = run_gloo(2, _run_shared_over_processes)
    for index, factor in enumerate([None, 0.0, 0.6]):
        answer = reference(Case(1, 2, 2, [7], [2], factor))
        for rank in range(2):
            torch.testing.assert_close(results[rank][index].output, answer.outputs[0])
            torch.testing.assert_close(results[rank][index].input_grad, answer.input_grads[0])
            torch.testing.assert_close(results[rank][index].grads["router"], answer.grads["router"])
