"""fairseq's optimizer where the weights of a model stream: one for each block of it, which fairseq
sees as one, also in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.experts.marks import is_expert
from moe_plugin.hosts.fairseq.compat.names import (
    FairseqOptimizer,
    FP16Optimizer,
    MemoryEfficientFP16Optimizer,
)
from moe_plugin.memory.weights.blocks import StreamedBlock
from moe_plugin.memory.weights.optimizer_state import state_of
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.training.gradients import multi_tensor
from moe_plugin.training.gradients.replicas import replicas_of


class BlockOptimizers(FairseqOptimizer):
    """The optimizers of all blocks.

    A step's passes leave gradients and their norm. They are divided by the step's size, but not in
    16 bits, where fairseq's optimizer around this one multiplies them once.

    Args:
        cfg: of fairseq's optimizer.
        trainer: with blocks in the order of the model's parameters.
        stepped: called after each step.
    """

    supports_step_with_scale = supports_groups = supports_flat_params = False
    supports_memory_efficient_fp16 = False
    disable_mem_eff_fp16_loading_hack = True  # `load_state_dict` keeps the dtypes of a state

    def __init__(self, cfg: Any, trainer: StreamedTrainer, stepped: Callable[[], None]) -> None:
        super().__init__(cfg)
        self.trainer, self.stepped, self.gradient_norm = trainer, stepped, torch.zeros(())

    @property
    def optimizer(self) -> BlockOptimizers:
        """This one: there is no single optimizer of torch's."""
        return self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all blocks."""
        return self.trainer.param_groups

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.trainer.forget()

    def multiply_grads(self, c: float | Tensor) -> None:
        """In 16 bits, once a block is stepped; else the passes did it."""
        self.trainer.clip.multiply(c)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        """The norm of all gradients, which are clipped when their block is stepped."""
        return self.gradient_norm

    def step(self, closure: Any = None, scale: float = 1.0, groups: Any = None) -> None:
        """Clip and step, block after block."""
        self.trainer.update()
        self.stepped()

    def state_dict(self) -> dict[str, Any]:
        """As one optimizer of the whole model has it."""
        self.trainer.settle()
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for block, first in self._with_optimizers():
            own = block.optimizer.state_dict()
            groups = groups or [{**own["param_groups"][0], "params": []}]
            for i, values in own["state"].items():
                state[first + i] = dict(values)
            for (i, name), x in block.state_tensors().items():
                state[first + i][name] = x
            groups[0]["params"] += range(first, first + len(block.trained))
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any],
                        optimizer_overrides: Mapping[str, Any] | None = None) -> None:
        """Take what `state_dict`, or the optimizer of a whole model, gave.

        Raises:
            ValueError: it is of another number of parameters.
        """
        [group], state = state_dict["param_groups"], state_dict["state"]
        there, here = len(group["params"]), sum(len(b.trained) for b in self.trainer.blocks)
        if there != here:
            raise ValueError(f"the checkpoint's optimizer has {there} parameters, this model "
                             f"{here}: must be equal; give --reset-optimizer")
        self.trainer.settle()
        for block, first in self._with_optimizers():
            numbers = range(len(block.trained))
            # torch keeps what it is given: the file's tensors are not those of the run
            own = {i: {name: x.clone() if isinstance(x, Tensor) else x
                       for name, x in state[first + i].items()}
                   for i in numbers if first + i in state}
            block.optimizer.load_state_dict({
                "state": own, "param_groups": [{**group, "params": list(numbers)}]})
            # torch casts a state to its parameter's dtype
            block.load_state({key: own[key[0]][key[1]] for key in state_of(block.optimizer)})
        for each in self.param_groups:
            each.update(optimizer_overrides or {})

    def _with_optimizers(self) -> Iterator[tuple[StreamedBlock, int]]:
        """Blocks that train, and the number of their first parameter among all that do."""
        first = 0
        for block in self.trainer.blocks:
            if block.optimizer is not None:
                yield block, first
            first += len(block.trained)


class _DropsGradients:
    """A fairseq optimizer of 16 bits around `BlockOptimizers`, which drops their gradients."""

    def zero_grad(self) -> None:
        """fairseq's, and the gradients that wait."""
        self.blocks.zero_grad()
        super().zero_grad()


def in_16_bits(cfg: Any, blocks: BlockOptimizers) -> FairseqOptimizer:
    """fairseq's own optimizer of 16 bits, with its loss scaler, around that of the blocks, which
    have the main weights.
    """
    efficient = memory_efficient(cfg)
    kind = MemoryEfficientFP16Optimizer if efficient else FP16Optimizer
    # fairseq compares its name with that in a checkpoint
    named = type(kind.__name__, (_DropsGradients, kind), {"blocks": blocks})
    return named(cfg, [], blocks) if efficient else named(cfg, [], blocks, [])


def memory_efficient(cfg: Any) -> bool:
    """Whether 16-bit weights have no main weights."""
    return cfg.common.memory_efficient_fp16 or cfg.common.memory_efficient_bf16


class FairseqNorm:
    """The bits of fairseq's own clipping in one process, a `memory.weights.streamed.Clip`: the norm
    of the norms of dense gradients, and with it the squares of all experts'.

    Args:
        max_norm: of all gradients; 0: they are not clipped.
        size: of the step, known once the last block's passes are done; gradients are divided by it.
            None: in 16 bits they are multiplied by what `multiply` gets, and not clipped.
    """

    def __init__(self, max_norm: float, size: Callable[[], float] | None) -> None:
        self.max_norm, self.size = float(max_norm), size
        self.forget()

    def forget(self) -> None:
        """Drop what was taken."""
        self._dense: dict[int, list[Tensor]] = {}
        self._experts = multi_tensor.SquaredNorm()
        self._factor, self._product = 1.0, 1.0  # type: float, float | Tensor

    @torch.no_grad()
    def add(self, place: int, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the gradients of a block, and take their norms; place: its number."""
        owners = [p for p in parameters if p.grad is not None]
        if self.size is not None:
            multi_tensor.scale_([p.grad for p in owners], 1 / self.size())
        experts = [p for p in owners if is_expert(p)]
        self._experts.add(place, [p.grad for p in experts], [replicas_of(p) for p in experts])
        self._dense[place] = [torch.norm(p.grad, p=2, dtype=torch.float32) for p in owners
                              if not is_expert(p)]

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm of all that was taken, 0-dim float32."""
        norms = [norm for place in sorted(self._dense) for norm in self._dense[place]]
        dense = norms[0] if len(norms) == 1 else torch.norm(torch.stack(norms))
        squared = dense.double()**2 + self._experts.total(dense.device)
        total = squared.sqrt().to(dense.dtype)
        factor = float((self.max_norm / (total + 1e-6)).clamp(max=1)) if self.max_norm > 0 else 1.0
        self.forget()
        self._factor = factor
        return total

    def multiply(self, factor: float | Tensor) -> None:
        """In 16 bits: what `scale` multiplies gradients by."""
        if self.size is None:
            self._product = factor

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Make them smaller where the norm is above its bound; NaN reaches all."""
        if self.size is None:
            multi_tensor.scale_(gradients, self._product)
            return
        if math.isnan(self._factor) or self._factor < 1:
            multi_tensor.scale_(gradients, self._factor)
