"""Loads for benchmarks, routing replay and routing traces, as Megatron's own layer has them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.layers import EXPERTS, Case, build, initialise_parallel, run
from tests.hosts.megatron.ranks import on_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
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


def _replayed(case: Case) -> list[list[int]]:
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
    on_ranks(1, _replayed, Case(native={"moe_enable_routing_replay": True, **AUX}))


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
