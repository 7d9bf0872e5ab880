"""Every registered router inside Megatron's layer: gradients, recomputation, checkpoints, token
ids, steps; forced loads, routing replay and traces, as Megatron's own layer has them.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moe_plugin.hosts.megatron.same_tokens import StepClock, ids_of
from tests.hosts.megatron.layers import (
    BATCH,
    EXPERTS,
    SEQUENCE,
    Case,
    batch,
    build,
    initialise_parallel,
    run,
)
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import PP2, argv_for, ran


def _layer(case: Case, name: str, **settings: Any) -> Any:
    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.hosts.megatron.spec import swap_moe
    from tests.routing.references import reference_of

    flat = {
        f"router.{key}": value for key, value in reference_of(name).settings.items()
        if not isinstance(value, dict)
    }
    for key, value in reference_of(name).settings.items():
        flat |= {f"router.{key}.{inner}": v
                 for inner, v in value.items()} if isinstance(value, dict) else {}
    torch.manual_seed(2)
    spec = swap_moe(core.gpt_moe_layer_spec(False), {"router.name": name, **flat, **settings})
    submodules = spec.keywords["submodules"] if hasattr(spec, "keywords") else spec.submodules
    config = case.config()
    layer = submodules.mlp(config=config) if hasattr(
        submodules.mlp, "keywords") else core.build_module(submodules.mlp, config=config)
    layer.set_layer_number(1)
    layer.tokens_BT = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % 11
    return layer.train()


def _gradients(layer: Any, case: Case) -> list[torch.Tensor]:
    x, weigh, _ = batch(case)
    x.requires_grad_()
    torch.manual_seed(4)
    (layer(x)[0] * weigh).sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("native, name, words", [
    ({}, "topk", "before_drop"), ({}, "switch", "auto"), ({}, "ktop1", "auto"),
    ({"moe_router_pre_softmax": True}, "ktop1", "none"),
    ({"moe_router_topk": 1, "moe_router_score_function": "sigmoid"}, "topk", "auto"),
    ({"moe_router_topk": 4}, "switch", "router.top_k=4 .* must be 1 where router.name='switch'"),
    ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, "gshard",
     "router.top_k=1 .* must be 2 where router.name='gshard'"),
])
def test_a_native_setting_goes_to_routers_that_read_it(native: dict[str, Any], name: str,
                                                       words: str) -> None:
    from moe_plugin.hosts.megatron.translate import translate

    config, given = Case(native=native).config(), {"router.name": name}
    if words in ("auto", "none", "before_drop"):
        assert translate(config, given).config.router.normalize == words
    else:
        with pytest.raises(ValueError, match=words):
            translate(config, given)


def _every_router(case: Case) -> dict[str, tuple[float, list[str]]]:
    from moe_plugin.routing import finish_step, routers

    initialise_parallel(case)
    again = replace(
        case,
        native={**case.native, "recompute_granularity": "selective", "recompute_modules": ["moe"]})
    found = {}
    for name in routers.names():
        plain, recomputed = _layer(case, name), _layer(again, name)
        recomputed.load_state_dict(plain.state_dict())
        want, got = _gradients(plain, case), _gradients(recomputed, again)
        worst = max(float((a - b).abs().max()) for a, b in zip(want, got, strict=True))
        finish_step(recomputed)
        saved = {key for key in recomputed.sharded_state_dict() if key.startswith("router.")}
        assert saved == {f"router.{key}" for key in recomputed.router.state_dict()}
        found[name] = (worst, sorted(saved))
    return found


@pytest.mark.parametrize("sizes", [{}, {"ep": 2}, {"tp": 2}],
                         ids=["one rank", "EP2", "TP2 without SP"])
def test_every_router_recomputes_and_saves_its_state(sizes: dict[str, int]) -> None:
    """Routers that exchange something (base) or count over ranks included: a recomputation starts
    no collective of its own.
    """
    found = on_ranks(max(sizes.values(), default=1), _every_router,
                     Case(native={"moe_aux_loss_coeff": 0.01}, **sizes))[0]
    assert max(worst for worst, _ in found.values()) < 1e-6 and len(found) >= 16
    assert found["sigmoid_bias"][1] == ["router.bias_E", "router.weight_ED"
                                        ] and found["hash"][1] == ["router.table_V"]
    assert found["dense_to_sparse"][1] == ["router.step", "router.weight_ED"]


def _hash_loads(case: Case) -> tuple[list[int], list[int]]:
    initialise_parallel(case)
    layer = _layer(case, "hash")
    layer(batch(case)[0])
    return layer.last_stats.load_KE[0].tolist(), torch.bincount(
        layer.router.table_V[layer.tokens_BT.flatten()], minlength=EXPERTS).tolist()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_token_ids_are_those_of_this_tensor_parallel_ranks_positions(
        sequence_parallel: bool) -> None:
    results = on_ranks(2, _hash_loads, Case(tp=2, sequence_parallel=sequence_parallel))
    assert [a + b for a, b in zip(results[0][0], results[1][0], strict=True)] == results[0][1]


def _biases(case: Case) -> tuple[list[float], list[float]]:
    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.routing import finish_step

    initialise_parallel(case)
    layer = _layer(case, "sigmoid_bias")
    layer(batch(case)[0])
    finish_step(layer)
    explicit = layer.router.bias_E.tolist()
    # Megatron's own loop: two micro-batches a step by its calculator; the third pass is the next
    # step's first
    clocked = _layer(case, "sigmoid_bias")
    core.microbatches_a_step = lambda: 2
    for _ in range(2):
        clocked(batch(case)[0])
    assert clocked.router.bias_E.abs().sum() == 0
    clocked.sharded_state_dict()  # a checkpoint has the step's end
    saved = clocked.router.bias_E.tolist()
    clocked(batch(case)[0])
    assert clocked.router.bias_E.tolist() == saved
    return explicit, saved


def test_biases_are_those_of_all_data_parallel_ranks() -> None:
    results = on_ranks(2, _biases, Case(ep=1))
    assert all(r == results[0]
               for r in results) and results[0][0] == results[0][1] and any(results[0][0])


def _counted_steps(case: Case) -> list[int]:
    from moe_plugin.hosts.megatron import script_features
    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.utils.run_feature import StepFacts
    from tests.hosts.megatron.training import MODEL, parsed

    initialise_parallel(case)
    core.microbatches_a_step = lambda: 2
    alone, with_run = _layer(case, "dense_to_sparse"), _layer(case, "dense_to_sparse")
    given = vars(parsed([*MODEL, "--train-iters", "2"]))
    script_features.script_arguments = lambda: given
    run = script_features.run_of([torch.nn.ModuleList([with_run])], None, None, {})[0]
    for number in (1, 2):
        for _ in range(2):
            alone(batch(case)[0])
            with_run(batch(case)[0])
        run.after_step(StepFacts(number))
    for layer in (alone, with_run):
        layer.sharded_state_dict()
    return [int(layer.router.step) for layer in (alone, with_run)]


def test_a_step_ends_once_in_routers_whether_a_run_or_the_layer_ends_it() -> None:
    assert on_ranks(1, _counted_steps, Case())[0] == [2, 2]


def test_step_clock() -> None:
    clock = StepClock()
    assert [clock.new_step(3)
            for _ in range(8)] == [False, False, False, True, False, False, True, False]
    assert not clock.ended() and [clock.new_step(None) for _ in range(3)] == [False] * 3
    clock = StepClock()
    clock.new_step(1)
    assert clock.ended() and not clock.ended() and not clock.new_step(2)


def test_missing_token_ids_are_explained() -> None:
    with pytest.raises(ValueError, match="give_token_ids"):
        ids_of(torch.zeros(4, 2, 8), None, frozenset({"token_ids"}), 0)
    ids_SB = ids_of(torch.zeros(4, 2, 8), torch.arange(14).view(2, 7), frozenset({"token_ids"}), 1)
    assert ids_SB.tolist() == [[4, 11], [5, 12], [6, 13], [0, 0]]


@pytest.mark.parametrize(("rank", "cut", "ids"), [
    (0, False, [[0, 4], [1, 5]]), (1, False, [[2, 6], [3, 7]]),
    (0, True, [[0, 2], [1, 3]]), (1, True, [[4, 6], [5, 7]])])
def test_token_ids_of_packed_samples(rank: int, cut: bool, ids: list[list[int]]) -> None:
    """Two ranks have [2, 2, 8]: two samples of 4 tokens, cut by the layer, or four of 2, of which
    Megatron gives each rank two.
    """
    found = ids_of(torch.zeros(2, 2, 8), torch.arange(8)[None], frozenset({"token_ids"}), rank, cut)
    assert found.tolist() == ids


# (settings of ours, Megatron's own)
DRAWING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({}, {}) for name in ("gshard", "noisy_topk", "dense_to_sparse", "base", "sparsemixer",
                             "quantile", "sigmoid_bias")},
    "topk": ({"router.second_expert_policy": "sampling"}, {}),
    "switch": ({"router.input_dropout": 0.3}, {"moe_input_jitter_eps": 0.2}),
}
FULL = ["--recompute-granularity", "full", "--recompute-num-layers"]


def _step(way: str, case: Case, name: str, settings: dict[str, Any]) -> list[torch.Tensor]:
    """Gradients, buffers and the generator's state after a step of two micro-batches whose backward
    passes come in reverse order; before it a pass without gradients, and one without backward.
    """
    from megatron.core import tensor_parallel

    from moe_plugin.routing import finish_step

    layer = _layer(case, name, **settings)

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(layer(F.dropout(x, 0.1))[0], 0.5)

    def passed(x: torch.Tensor) -> torch.Tensor:
        if way != "full":
            return block(x)
        return tensor_parallel.checkpoint(block, False, x)

    x, weigh, _ = batch(case)
    torch.manual_seed(4)
    with torch.no_grad():
        passed(x[:5])
    passed(x.flip(0).requires_grad_())
    finish_step(layer)
    xs = [part.clone().requires_grad_() for part in (x, x.flip(0))]
    for y in [passed(part) for part in xs][::-1]:
        (y * weigh).sum().backward()
    finish_step(layer)
    return [*(part.grad for part in xs), *(p.grad for p in layer.parameters()), *layer.buffers(),
            torch.get_rng_state()]


def _ways(sizes: dict[str, int]) -> dict[str, dict[str, bool]]:
    ways = {"kept": {}, "full": {"recompute_granularity": "full", "recompute_method": "uniform",
                                 "recompute_num_layers": 1},
            "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}}
    initialise_parallel(Case(**sizes))
    found: dict[str, dict[str, bool]] = {}
    for name, (settings, more) in DRAWING.items():
        steps = {way: _step(way, Case(native={"moe_aux_loss_coeff": 0.01, **native, **more},
                                      **sizes), name, settings) for way, native in ways.items()}
        found[name] = {way: all((a is None) == (b is None) and (a is None or torch.equal(a, b))
                                for a, b in zip(step, steps["kept"], strict=True))
                       for way, step in steps.items()}
    return found


@pytest.mark.parametrize("sizes", [{}, {"ep": 2}], ids=["one rank", "EP2"])
def test_a_layer_has_the_bits_of_one_that_keeps_its_activations(sizes: dict[str, int]) -> None:
    for found in on_ranks(max(sizes.values(), default=1), _ways, sizes):
        assert set(found) == set(DRAWING)
        assert not {name: same for name, same in found.items() if not all(same.values())}


def _curve(argv: list[str]) -> list[tuple[Any, ...]]:
    return [(r["lm_loss"], r["grad_norm"], r["aux_losses"]) for r in ran(argv).steps_logged]


@pytest.mark.parametrize("sizes", [[], [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]],
                         ids=["one stage", "interleaved stages"])
def test_a_run_has_the_losses_and_norms_of_one_that_keeps_its_activations(
        sizes: list[str], data: str) -> None:
    argv = argv_for(data, 2, "--num-layers", "4", "--hidden-dropout", "0.1", "--attention-dropout",
                    "0.1", "--moe-router", "gshard", *sizes)
    again = [[*FULL, "1", "--recompute-method", "uniform"],
             [*FULL, "1", "--recompute-method", "block"],
             ["--recompute-granularity", "selective", "--recompute-modules", "moe"]]
    kept, *others = (on_ranks(2 if sizes else 1, _curve, [*argv, *way]) for way in ([], *again))
    assert len(kept[0]) == 2 and others == [kept] * 3


AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
FORCED = {"even on average": {"moe_router_force_load_balancing": True},
          "with a bias": {"moe_router_force_biased": 2.0}}


def _alike(results: list[dict[str, Any]]) -> None:
    native, ours = results
    for name, value in native.items():
        if value is not None:
            torch.testing.assert_close(ours[name], value, msg=lambda text, name=name:
                                       f"{name}: {text}", rtol=1e-5, atol=1e-5)


def _forced(case: Case) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    initialise_parallel(case)
    results = []
    for ours in (False, True):
        layer = build(case, ours)
        model_parallel_cuda_manual_seed(1)  # the same random logits for both
        results.append(run(layer, case))
    _alike(results)


@pytest.mark.parametrize("how", FORCED)
def test_forced_loads_are_megatrons(how: str) -> None:
    case = Case(ep=2, native={**AUX, **FORCED[how]})
    from moe_plugin.hosts.megatron.compat.names import TransformerConfig

    if not FORCED[how].keys() <= {field.name for field in fields(TransformerConfig)}:
        pytest.skip(f"this megatron-core has no {', '.join(FORCED[how])} (from 0.17 on)")
    on_ranks(2, _forced, case)


def _replayed_by_megatron(case: Case) -> list[list[int]]:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    initialise_parallel(case)
    g = torch.Generator().manual_seed(0)
    chosen_TK = torch.rand(24, EXPERTS, generator=g).topk(2).indices
    results, recorded = [], []
    for ours in (False, True):
        RouterReplay.clear_global_router_replay_instances()
        layer = build(case, ours)
        RouterReplay.set_replay_data([chosen_TK])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        results.append(run(layer, case))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        run(layer, case)
        recorded += [ids_TK.sort(1)[0].tolist() for ids_TK in RouterReplay.get_recorded_data()]
    _alike(results)
    assert recorded[0] == recorded[1] != chosen_TK.sort(1)[0].tolist()


def test_routing_replay_is_megatrons() -> None:
    pytest.importorskip("megatron.core.transformer.moe.router_replay", reason="from 0.16 on")
    on_ranks(1, _replayed_by_megatron, Case(native={"moe_enable_routing_replay": True, **AUX}))


def _in_model(layer: torch.nn.Module) -> torch.nn.Module:
    """A model whose decoder has this layer alone."""
    model = torch.nn.Module()
    model.decoder, block = torch.nn.Module(), torch.nn.Module()
    model.decoder.layers, block.mlp = torch.nn.ModuleList([block]), layer
    return model


def _traced(folder: str) -> None:
    from megatron.core.transformer.moe.router_trace import RouterTracer

    from moe_plugin.config import ObserveConfig
    from moe_plugin.hosts.megatron.run import traced
    from moe_plugin.observe.traces import trace_of, trace_path
    from tests.observe.test_traces import choices_of

    initialise_parallel(Case())
    native = build(Case(), False)
    tracer = RouterTracer(f"{folder}/native", 1, 0, training_mode=True)
    tracer.register_hooks(_in_model(native))
    run(native, Case())
    tracer.advance_step(0)

    ours = build(Case(), True)
    args = SimpleNamespace(moe_routing_trace_path=f"{folder}/ours")
    trace = trace_of(traced(ObserveConfig(), args, [ours]), {"layer1": ours}, 0)
    run(ours, Case())
    assert trace is not None
    trace.end_step(1)
    files = [trace_path(f"{folder}/{name}", 0) for name in ("native", "ours")]
    rows = [json.loads(path.read_text()) for path in files]
    for row in rows:  # the order of a token's experts has no meaning
        row["top_indices"] = [sorted(ids) for ids in row["top_indices"]]
    assert rows[0] == rows[1]
    # Megatron's file is replayed by our router, whatever it would choose itself
    with torch.no_grad():
        ours.router.weight_ED.neg_()
    again = trace_of(ObserveConfig(replay=f"{folder}/native", trace=f"{folder}/again"),
                     {"layer1": ours}, 0)
    run(ours, Case())
    assert again is not None
    again.end_step(1)
    [a], [b] = (choices_of(trace_path(f"{folder}/{name}", 0)).values()
                for name in ("native", "again"))
    assert torch.equal(a[0], b[0])
    for capture in ("capture_logits", "capture_hidden_states", "dump_weights"):
        more = SimpleNamespace(**vars(args), **{f"moe_routing_trace_{capture}": True})
        with pytest.raises(ValueError, match=f"moe_routing_trace_{capture}=True is not supported"):
            traced(ObserveConfig(), more, [ours])
    with pytest.raises(ValueError, match="contradicts --moe-routing-trace-path"):
        traced(ObserveConfig(trace="elsewhere"), args, [ours])


def test_routing_traces_are_megatrons(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.transformer.moe.router_trace", reason="from 0.19 on")
    on_ranks(1, _traced, str(tmp_path))
