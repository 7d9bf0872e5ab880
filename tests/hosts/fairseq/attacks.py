"""What a rank of fairseq does, or prints, next to training: functions for `attack` of `run`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_plugin.comm import TorchComm
from moe_plugin.experts.base import is_expert
from moe_plugin.hosts.fairseq import layers
from moe_plugin.hosts.fairseq.trainer import MoETrainer
from moe_plugin.routing.contract import RouterSteps
from moe_plugin.training.gradients.replicas import ReplicaReducer


def poison(step: int) -> None:
    """Every layer that is built from now on has a NaN in one expert's gradient at its `step`-th
    backward pass (from 1).
    """
    original = layers.FairseqMoELayer.__init__

    def init(self: layers.FairseqMoELayer, settings: layers.LayerSettings) -> None:
        original(self, settings)
        passes = 0

        def spoil(gradient: Tensor) -> Tensor:
            nonlocal passes
            passes += 1
            if passes == step:
                gradient = gradient.clone()
                gradient.view(-1)[0] = float("nan")
            return gradient

        self.moe.experts.w_in_LDF.register_hook(spoil)

    layers.FairseqMoELayer.__init__ = init  # type: ignore[method-assign]


def tell_counts() -> None:
    """Print, at the end of each step, this rank's real tokens and what the first MoE layer's router
    has counted: `ROUTER {...}`.
    """
    torch.set_num_threads(1)
    step, after = MoETrainer.train_step, RouterSteps.after_step
    tokens = 0

    def train_step(self: MoETrainer, samples: list[Any], *args: Any) -> Any:
        nonlocal tokens
        tokens = sum(int(sample["ntokens"]) for sample in samples if sample)
        return step(self, samples, *args)

    def after_step(self: RouterSteps, facts: Any) -> None:
        router = layers.moe_layers(self.models[0])[0].moe_layer.moe.router
        sums, before_E = [each.tolist() for each in router.step_sums()], router.bias_E.clone()
        told = {"step": facts.number, "tokens": tokens, "sums": sums,
                "step_load": router.step_load_E.tolist()}
        after(self, facts)
        told["moved"] = (router.bias_E - before_E).tolist()
        os.write(1, f"ROUTER {json.dumps(told)}\n".encode())

    MoETrainer.train_step, RouterSteps.after_step = train_step, after_step


def _size(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of different storages."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors if x is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in local if x.numel()}.values())


def _stored(trainer: Any) -> dict[str, int]:
    """Bytes of dense parameters, their gradients, fp32 copies and optimizer state on this rank."""
    model = [p for p in trainer.model.parameters() if not is_expert(p)]
    updated = [p for p in trainer.optimizer.params if not is_expert(p)]
    state = trainer.optimizer.optimizer.state
    masters = [p for p in updated if p.dtype != model[0].dtype]
    given = getattr(trainer.optimizer, "fp16_params", updated)
    return {
        "rank": trainer.data_parallel_rank, "parameters": _size(p.detach() for p in model),
        "gradients": _size([p.grad for p in model] + [p.grad for p in given if not is_expert(p)]),
        "masters": _size(masters), "all": sum(p.numel() * p.element_size() for p in model),
        "state": _size(x for p in updated for x in state[p].values() if torch.is_tensor(x))
        if state else 0,
        "experts": _size(x for p in trainer.optimizer.params if is_expert(p)
                         for x in state[p].values() if torch.is_tensor(x)) if state else 0,
    }


def tell_bytes() -> None:
    """Print `BYTES {...}` in every step when gradients are clipped: what this rank stores, the
    number of all-reduces between replicas, and of those among them that started before backward
    ended.
    """
    clip, start, finish = (MoETrainer.clip_grad_norm, TorchComm.start_all_reduce,
                           ReplicaReducer.finish)
    started: list[str] = []
    late: list[bool] = []

    def start_all_reduce(self: TorchComm, x: Tensor) -> Any:
        started.append("late" if late else "behind")
        return start(self, x)

    def clip_grad_norm(self: Any, clip_norm: float) -> Tensor:
        found = {**_stored(self), "reductions": len(started), "behind": started.count("behind")}
        print("BYTES", json.dumps(found), flush=True)
        started.clear()
        return clip(self, clip_norm)

    def finish_all(self: ReplicaReducer) -> None:
        late.append(True)
        finish(self)
        late.clear()

    MoETrainer.clip_grad_norm = clip_grad_norm  # type: ignore[method-assign]
    ReplicaReducer.finish = finish_all  # type: ignore[method-assign]
    TorchComm.start_all_reduce = start_all_reduce  # type: ignore[method-assign]
