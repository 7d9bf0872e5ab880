"""Torch's selective activation checkpoints around MoE layers: more policies, two ranks, hooks, and
models of `transformers`. Every router under such a checkpoint: `test_recomputation.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from moe_plugin.observe.model_layers import listen_to
from moe_plugin.output import LayerStats
from moe_plugin.utils.selective import hidden_from_policies
from tests.checkpoint.hf_models import tiny, tokens
from tests.distributed import run_gloo
from tests.exactness.recomputed import (
    COSTLY,
    DRAWING,
    KINDS,
    ROUTERS,
    Run,
    blocks_of,
    check,
    expected,
    forward,
    inputs,
    nested,
    reentrant,
    seen,
    selective,
    step,
)

aten = torch.ops.aten
# torch's dropout fills a tensor in place, and a policy must not save such a tensor
IN_PLACE = (aten.empty_like.default, aten.bernoulli_.float, aten.div_.Scalar)


def chosen(policy: CheckpointPolicy, other: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    """A policy for costly operations, and one for others."""
    return lambda ctx, op, *args, **kwargs: (
        policy if op in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE if op in IN_PLACE else other)


SAVE, RECOMPUTE = CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
MORE: dict[str, Run] = {
    "prefer to save": selective(partial(chosen, SAVE, RECOMPUTE)),
    "must recompute": selective(partial(chosen, CheckpointPolicy.MUST_RECOMPUTE, SAVE)),
    "everything": selective(partial(chosen, CheckpointPolicy.MUST_SAVE, SAVE)),
    "in reentrant": nested(reentrant, KINDS["selective"]),
}


@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("name", [*DRAWING, "sigmoid_bias", "capacity", "ta_moe"])
def test_policies(name: str, kind: str) -> None:
    check(step(ROUTERS[name], MORE[kind]), expected(name), kind)


NAMES = ["topk random", "sigmoid_bias", "global batch", "capacity"]


def steps_of_a_rank() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    kinds = [(name, kind) for name in NAMES for kind in ("selective", "selective by a list")]
    return [(kind, step(ROUTERS[name], KINDS[kind]), step(ROUTERS[name], None))
            for name, kind in kinds]


@pytest.mark.distributed
def test_two_ranks() -> None:
    for found in run_gloo(2, steps_of_a_rank):
        for kind, again, kept in found:
            check(again, kept, kind)


def test_what_hooks_count_does_not_move_saved_results() -> None:
    found = []
    for run in (None, KINDS["selective"]):
        blocks, xs, loads = blocks_of(ROUTERS["topk random"]), inputs(11), list[Any]()

        def take(name: str, stats: LayerStats, loads: list[Any] = loads) -> None:
            # operations that a recomputation does not repeat
            loads.append(stats.load_KE.sum(0).double().mul(2.0) + 1.0)

        listen_to(blocks, take)
        loss = forward(blocks, run, xs[0])
        loss.backward()
        found.append({**seen(blocks, xs, [loss]), "loads": torch.stack(loads)})
    check(found[1], found[0])


def test_other_modes_see_what_policies_do_not() -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (),
                               kwargs: Any = None) -> Any:
            self.ops.append(func)
            return func(*args, **(kwargs or {}))

    inner, told = Seen(), list[Any]()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        told.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    @hidden_from_policies
    def hidden(x: Any) -> Any:
        return x.sin()

    def run(x: Any) -> Any:
        with inner:
            return hidden(x).cos()

    selective(lambda: policy)(run, torch.ones(2, requires_grad=True)).sum().backward()
    assert aten.sin.default not in told and aten.cos.default in told
    assert inner.ops.count(aten.sin.default) == 2 and aten.cos.default in inner.ops


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_models_of_transformers(kind: str) -> None:
    pytest.importorskip("transformers", minversion="5.20")
    found = []
    for run in (None, KINDS["selective"], KINDS["selective by a list"]):
        model = tiny(kind).train()
        swap_moe_blocks(model, settings={"router.noise": 4.0} if kind == "mixtral" else {})
        if run is not None:
            model.gradient_checkpointing_enable(run.keywords)  # type: ignore[attr-defined]
        ids, mask = tokens(model), torch.ones(2, 17, dtype=torch.long)
        mask[1, 11:] = 0
        torch.manual_seed(3)
        loss = model(ids, labels=ids, attention_mask=mask).loss
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters()), *model.buffers(),
                      torch.get_rng_state()])
    for again in found[1:]:
        for value, wanted in zip(again, found[0], strict=True):
            assert (value is None) == (wanted is None)
            assert value is None or torch.equal(value, wanted)
