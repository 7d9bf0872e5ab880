"""The audit target for DeepSpeed's MoE layer, without ZeRO."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.audit.contract import Batch, HeldPart, Parts
from scripts.audit.reference import TINY
from scripts.audit.targets.plain import TinyNetwork


def join_ranks() -> None:
    """Initialize DeepSpeed's communication with the gloo backend.

    By default, DeepSpeed first compiles an all-reduce over shared memory and functions that flatten
    tensors. This function disables the shared-memory all-reduce and uses torch's functions to
    flatten tensors.
    """
    import deepspeed
    from deepspeed.runtime import engine
    from torch import _utils

    flat = SimpleNamespace(flatten=_utils._flatten_dense_tensors,
                           unflatten=_utils._unflatten_dense_tensors)
    # imported by its full name, because `deepspeed.comm.torch` as an attribute is torch itself
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    engine.UtilsBuilder = lambda: SimpleNamespace(load=lambda: flat)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


class GradientsKept(torch.optim.SGD):
    """An optimizer that copies the gradients of each step.

    DeepSpeed's engine clears the gradients in the same call, so they must be copied.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.kept: dict[int, Tensor | None] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Copy every gradient. Parameters are not changed."""
        for group in self.param_groups:
            for p in group["params"]:
                self.kept[id(p)] = None if p.grad is None else p.grad.clone()

    def part(self, tensor: Tensor, where: Any = ()) -> HeldPart:
        """Return a slice of a parameter as a `HeldPart` with the gradient of the last step."""
        return HeldPart(tensor, where, grad=lambda: self.kept.get(id(tensor)))


class Engine:
    """DeepSpeed's engine, configured with the gradient accumulation and clipping that each batch
    requires.

    Attributes:
        norm: the gradient norm used for clipping in the last step.
    """

    def __init__(self, network: nn.Module) -> None:
        import deepspeed
        from deepspeed.runtime import engine

        join_ranks()
        original = engine.clip_grad_norm_

        def clip(**arguments: Any) -> Any:
            self.norm = float(original(**arguments))

        engine.clip_grad_norm_ = clip  # without ZeRO the engine does not store the norm
        self.norm = 0.0
        self.engine, *_ = deepspeed.initialize(
            model=network, optimizer=GradientsKept,
            config={"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
        self.optimizer: GradientsKept = self.engine.optimizer

    def step(self, batch: Batch, losses: Iterator[Tensor]) -> dict[str, float]:
        """Run the backward pass and the engine's step for the mean loss of each micro-batch."""
        number = len(batch.micro_batches)
        self.engine.set_train_batch_size(number * dist.get_world_size())
        self.engine.micro_steps = 0  # the engine does not reset it for another number
        self.engine._config.gradient_clipping = batch.clip or 0.0
        total = torch.zeros(())
        for loss in losses:
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / number
        dist.all_reduce(total)
        answer = {"loss": float(total) / dist.get_world_size()}
        return answer if batch.clip is None else {**answer, "norm": self.norm}


class _Expert(nn.Module):
    """A single expert. DeepSpeed's MoE layer needs a separate module for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(TINY.width, TINY.hidden, bias=False)
        self.up = nn.Linear(TINY.width, TINY.hidden, bias=False)
        self.down = nn.Linear(TINY.hidden, TINY.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class DeepSpeed:
    """The audit target for `deepspeed.moe.layer.MoE`. The layer does not drop tokens."""

    supports = ("accumulation", "clipping", "recompute")

    def build(self, ranks: int, ep: int) -> Parts:
        """Build the model on this rank. Each expert is a separate module."""
        from deepspeed.moe.layer import MoE

        join_ranks()
        layer = MoE(TINY.width, _Expert(), TINY.num_experts, ep_size=ep, k=TINY.top_k,
                    drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False)
        network = TinyNetwork(layer, lambda layer, x: layer(x)[0])
        self.engine = Engine(network)
        part = self.engine.optimizer.part
        parts: dict[str, Any] = {
            name: part(weight) for name, weight in network.dense_parts().items()}
        parts |= {"router": part(layer.deepspeed_moe.gate.wg.weight), "gate": [], "up": [],
                  "down": []}
        first = dist.get_rank() % ep * (TINY.num_experts // ep)
        for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts, first):
            for name in ("gate", "up", "down"):
                parts[name].append(part(getattr(expert, name).weight, number))
        return parts

    def step(self, batch: Batch) -> dict[str, float]:
        """Run the training step. The loss is the mean squared error of each micro-batch."""
        return self.engine.step(batch, (F.mse_loss(self.engine.engine(x, batch.recompute), y)
                                        for x, y in batch.micro_batches))
