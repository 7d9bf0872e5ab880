"""Optimizers for a Megatron model with streamed weights.

Each part of the model has a separate optimizer.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from moe_plugin.comm.host_collectives import named
from moe_plugin.experts.base import is_expert
from moe_plugin.hosts.megatron.compat import cpu
from moe_plugin.hosts.megatron.compat.optimizer import counts_in_norm, is_vector
from moe_plugin.memory.weights.files import SegmentsOnce

logger = logging.getLogger("moe_plugin.megatron")


class StreamedOptimizer:
    """The optimizers of all parts of a model, with the interface of a single Megatron optimizer."""

    optimizer = None  # the gradients of all parts never exist in memory at the same time
    is_stub_optimizer = False
    grad_scaler: Any = None  # Megatron's gradient scaler

    def __init__(self, model: Any, micro_batches: int) -> None:
        self.model, self.trainer, self._micro_batches = model, model.trainer, micro_batches
        self.grad_scaler = model.scaler
        self._segments = SegmentsOnce(self.trainer, logger)

    @property
    def kind(self) -> str:
        """Name of the optimizer class that the parts use."""
        return next((type(block.optimizer).__name__ for block in self.trainer.blocks
                     if block.optimizer is not None), "none")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizers of all parts."""
        return self.trainer.param_groups

    def get_loss_scale(self) -> Tensor:
        """Return the factor by which losses are multiplied, which is 1 without a loss scaler."""
        return torch.ones(1) if self.grad_scaler is None else self.grad_scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss unchanged. `StreamedModel` has already scaled the loss."""
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, because `StreamedModel.zero_grad_buffer` clears the gradients."""

    def prepare_grads(self) -> bool:
        """Return True if the step must be skipped."""
        return not math.isfinite(self.model.norm)

    def step(self) -> tuple[bool, float | None, None]:
        """Clip the gradients and run an optimizer step.

        Returns: three values. The first value is True if the step was made and False if it was
            skipped. The second value is the gradient norm. The third value, in Megatron the number
            of zeros in the gradients, is None.
        """
        skip = self.prepare_grads()
        self.trainer.update(skip)
        if skip:
            return False, None, None
        self._segments(self._micro_batches)
        return True, self.model.norm, None


class RankGradients:
    """Reduces the gradients of one part of a model over the ranks.

    The gradients are reduced with the same arithmetic as in Megatron's `DistributedDataParallel`
    and `finalize_model_grads`. First, the gradients are divided by the data-parallel size and
    summed over all ranks that store the parameter. If tensor-parallel ranks apply a parameter to
    different tokens, its gradient is also summed over these ranks. Megatron's process groups must
    already be initialised.
    """

    def __init__(self) -> None:
        self.size = ps.get_data_parallel_world_size(with_context_parallel=True)
        self.tensor = ps.get_tensor_model_parallel_group()
        self.data = {True: ps.get_expert_data_parallel_group(),
                     False: ps.get_data_parallel_group(with_context_parallel=True)}

    @staticmethod
    def mark(part: Any) -> None:
        """Mark the parameters whose gradients must be summed over tensor-parallel ranks."""
        for name, p in part.named_parameters():
            p.sum_over_tensor_ranks = part.config.sequence_parallel and getattr(
                p, "sequence_parallel", False) or part.config.qk_layernorm and (
                    "q_layernorm" in name or "k_layernorm" in name)

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce these parameters' gradients over the ranks. This is a collective operation."""
        trained: list[Any] = [p for p in parameters if p.requires_grad]
        for p in trained:
            if p.grad is None:  # the other ranks may have a gradient and wait in the collective
                p.grad = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        for expert, group in self.data.items():
            gradients = [p.grad for p in trained if is_expert(p) == expert]
            if self.size > 1:
                for gradient in gradients:
                    gradient.mul_(1 / self.size)
            _sum(gradients, group)
        _sum([p.grad for p in trained if p.sum_over_tensor_ranks], self.tensor)


def _sum(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if gradients and group.size() > 1:
        flat_N = torch.cat([gradient.reshape(-1) for gradient in gradients])
        with named("all_reduce of gradients", group):
            dist.all_reduce(flat_N, group=group)
        for gradient, part_N in zip(gradients, flat_N.split([g.numel() for g in gradients]),
                                    strict=True):
            gradient.copy_(part_N.view_as(gradient))


class StreamedNorm:
    """Gradient clipping (a `memory.weights.streamed.Clip`) that gives bitwise the same gradients as
    Megatron's own clipping.

    The gradients are bitwise equal only if neither Apex nor Transformer Engine is installed. Like
    Megatron, this class first computes the norm of each tensor, and then the norm of these norms.
    Dense parameters and experts are processed separately. The tensors are processed in the order of
    the optimizer: the matrices of the whole model precede the vectors. Finally, the norms are
    reduced over the ranks that store different parameters.

    Args:
        max_norm: upper bound for the global gradient norm. 0 disables clipping.
        scaler: loss scaler. The gradients are divided by the scale of the loss scaler. If None,
            losses are not scaled.
        ranks: object that reduces the gradients over ranks before the norm is computed. If None,
            there is only one rank.
    """

    def __init__(self, max_norm: float, scaler: Any = None,
                 ranks: RankGradients | None = None) -> None:
        self.max_norm, self.scaler, self.ranks, self._factor = max_norm, scaler, ranks, 1.0
        self.groups = {} if ranks is None else {
            True: ps.get_expert_tensor_model_pipeline_parallel_group(),
            False: ps.get_model_parallel_group()}
        self._norms: dict[tuple[bool, bool, int], list[Tensor]] = {}

    @torch.no_grad()
    def add(self, place: int, parameters: Sequence[nn.Parameter]) -> None:
        """Include the gradients of the model part with index `place` in the norm."""
        if self.ranks is not None:
            self.ranks(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if self.scaler is not None:
                parameter.grad.mul_(self.scaler.inv_scale)
            norms = self._norms.setdefault((is_expert(parameter), is_vector(parameter), place), [])
            if counts_in_norm(parameter):
                norms.append(torch.norm(parameter.grad))

    def norm(self) -> Tensor:
        """Return the norm of all gradients that were added since the last call, as a float64 scalar
        tensor. This is a collective operation.
        """
        norms = [self._norm_of(expert) for expert in (False, True)]
        kinds = [norm for norm in norms if norm is not None]
        total = kinds[0] if len(kinds) == 1 else math.sqrt(sum(norm**2 for norm in kinds))
        self._factor = self.max_norm / (total + 1e-6) if self.max_norm > 0 else 1.0
        self.forget()
        return torch.tensor(total, dtype=torch.float64)

    def _norm_of(self, expert: bool) -> float | None:
        keys = sorted(key for key in self._norms if key[0] == expert)
        if not keys:
            return None
        norms = [float(norm) for key in keys for norm in self._norms[key]]
        # the norm of the norms, in float32 and in this order, as in Megatron: any other way of
        # adding up would change the last bits
        squared = torch.norm(torch.tensor(norms, dtype=torch.float32))**2.0
        if (group := self.groups.get(expert)) is not None and group.size() > 1:
            squared = squared.to(device_of_parts())
            with named("all_reduce of the gradient norm", group):
                dist.all_reduce(squared, group=group)
        return float(squared)**0.5

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """If the norm exceeds `max_norm`, scale the gradients down."""
        if self._factor < 1:
            for gradient in gradients:
                gradient.mul_(self._factor)

    def forget(self) -> None:
        """Discard the norms of all gradients that were added."""
        self._norms = {}


def device_of_parts() -> torch.device:
    """Return the device that computes the parts of the model."""
    if torch.cuda.is_available() and not cpu.enabled():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def torch_optimizer(args: argparse.Namespace, params: Sequence[nn.Parameter]
                    ) -> torch.optim.Optimizer:
    """Create a torch optimizer with the same options and parameter groups that Megatron would use.

    Vectors have a separate parameter group without weight decay.
    """
    kinds = [(1.0, [p for p in params if not is_vector(p)]),
             (0.0, [p for p in params if is_vector(p)])]
    groups = [{"params": chosen, "weight_decay": args.weight_decay * times, "wd_mult": times,
               "lr_mult": 1.0, "is_decoupled_lr": False, "default_config": True}
              for times, chosen in kinds if chosen]
    make: Callable[..., torch.optim.Optimizer] = functools.partial(
        torch.optim.SGD, momentum=args.sgd_momentum)
    if args.optimizer == "adam":
        coupled = not getattr(args, "decoupled_weight_decay", True)
        make = functools.partial(
            torch.optim.Adam if coupled else torch.optim.AdamW, eps=getattr(args, "adam_eps", 1e-8),
            betas=(args.adam_beta1, args.adam_beta2), fused=args.moe_fused_adam or None)
    return make(groups, lr=args.lr)
