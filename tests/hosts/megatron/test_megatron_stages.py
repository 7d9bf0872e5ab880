"""The layer in steps: Megatron's schedule of one micro-batch's forward pass with another's
backward pass.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.layers import Case, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, ran

pytestmark = [
    pytest.mark.megatron, pytest.mark.distributed,
    pytest.mark.skipif(importlib.metadata.version("megatron-core") < "0.16",
                       reason="the schedule has these steps from 0.16 on")
]
OVERLAP = "--overlap-moe-expert-parallel-comm"
CASES = {
    "own router": [], "slots": ["--moe-dispatch", "padded", "--moe-capacity-factor", "1"],
    "gathered experts": ["--moe-parallel-r", "0"],
    "native router, shared expert": [
        "--moe-router-num-groups", "2", "--moe-router-group-topk", "1",
        "--moe-shared-expert-intermediate-size", "16"
    ], "dense layers between": ["--num-layers", "3", "--moe-layer-freq", "2"],
}


def _trained(argv: list[str]) -> tuple[dict[str, Any], list[Tensor], list[str]]:
    """The last record, all parameters, and the steps of the layers' calls."""
    from moe_plugin.hosts.megatron import stages

    called: list[str] = []

    def noted(step: Any, name: str) -> Any:
        return lambda self, *args: called.append(name) or step(self, *args)

    stages.Stages.route = noted(stages.Stages.route, "route")
    stages.Stages.combine = noted(stages.Stages.combine, "combine")
    run = ran(argv)
    return run.records[-1], [p.detach().clone() for p in run.model.parameters()], called


@pytest.mark.parametrize("name", CASES)
def test_the_overlapped_schedule_trains_the_same_model(name: str, data: str) -> None:
    """SGD without clipping, so that a wrong gradient would show in a parameter."""
    argv = [
        *MODEL, "--data-path", data, "--train-iters", "3", "--optimizer", "sgd", "--sgd-momentum",
        "0", "--lr", "0.3", "--clip-grad", "0", "--bf16", *EP2, *CASES[name]
    ]
    for plain, overlapped in zip(*(on_ranks(2, _trained, [*argv, *more])
                                   for more in ([], [OVERLAP])), strict=True):
        assert plain[2] == [] and overlapped[2].count("route") == overlapped[2].count("combine") > 0
        for key in ("lm_loss", "grad_norm"):
            assert overlapped[0][key] == pytest.approx(plain[0][key], rel=1e-3)
        for loss, by_layer in plain[0]["aux_losses"].items():
            assert overlapped[0]["aux_losses"][loss] == pytest.approx(by_layer, rel=1e-2)
        assert overlapped[0]["balance"].keys() == plain[0]["balance"].keys()
        for one, other in zip(overlapped[1], plain[1], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def _refusals(every: list[dict[str, Any]]) -> list[str]:
    messages = []
    for settings in every:
        native = {name: settings.pop(name) for name in list(settings) if "." not in name}
        case = Case(ep=2, dtype=torch.bfloat16, native={
            "overlap_moe_expert_parallel_comm": True, "num_layers": 2, **native})
        initialise_parallel(case)
        with pytest.raises(ValueError, match="overlap_moe_expert_parallel_comm=True") as refused:
            build(case, True, settings)
        messages.append(str(refused.value))
    return messages


def test_what_cannot_be_cut_into_steps_is_refused() -> None:
    every = {
        "parallel.mode='auto'": {"parallel.mode": "auto"}, "parallel.d=2": {"parallel.d": 2},
        "parallel.spill='everywhere'": {"parallel.spill": "everywhere"},
        "dispatch.name='all_gather'": {"dispatch.name": "all_gather"},
        "dispatch.send='nodes'": {"dispatch.send": "nodes"},
        "moe_layer_freq=2": {"moe_layer_freq": 2},
        "experts.weights_first=True": {"moe_apply_probs_on_input": True},
        "router.pre_gate=1": {"router.pre_gate": 1},
        "router.name='hash'": {"router.name": "hash", "router.hash.vocabulary": 16},
        "moe_token_dispatcher_type='flex'": {"moe_token_dispatcher_type": "flex"},
        "cuda_graph_impl='transformer_engine'": {
            "cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},
    }
    for messages in on_ranks(2, _refusals, list(every.values())):
        for name, message in zip(every, messages, strict=True):
            assert f"does not fit {name}: {name.split('=')[0]} must be" in message
            assert "or turn the overlap off" in message
