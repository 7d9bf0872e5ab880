"""Eager 1F1B (AlpaComm, arXiv 2211.05322). Eager 1F1B starts with more forward passes than 1F1B, so
that transfers overlap with computation.

With `pipeline.delay_weights`, each backward pass is also split. The gradients of inputs are
computed first, and the gradients of weights later. Each operation computes the two gradients
separately, instead of running a second pass over the autograd graph. A second pass over the graph
is not possible for two reasons: recomputed layers run their own backward pass inside the first
pass, and an MoE layer may exchange its rows only once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from torch import Tensor, nn

from moe_plugin.hosts.megatron.compat.names import mappings
from moe_plugin.hosts.megatron.pipeline.base import PipelineSchedule, refuse, register
from moe_plugin.hosts.megatron.pipeline.executor import Step
from moe_plugin.hosts.megatron.refusals import DELAYED_WEIGHTS
from moe_plugin.kernels.weight_grads import LaterGrads

LINEAR = "linear_with_grad_accumulation_and_async_allreduce"  # the function of Megatron's layers


@register
class EagerSchedule(PipelineSchedule):
    """A schedule in which stage `i` of `n` starts with `2 * (n - i) - 1` forward passes, so that
    transfers overlap with computation.
    """

    name = "eager-1f1b"

    def step(self, passes: dict[str, Any], config: Any) -> list[Any]:
        """Run one step. See `PipelineSchedule`."""
        step = SplitStep if self.settings.delay_weights else Step
        return step(passes, config, self.group, self.gradients, "eager").run()

    def check(self, passes: dict[str, Any], config: Any) -> None:
        """Check settings and arguments. See `PipelineSchedule`."""
        super().check(passes, config)
        if self.settings.delay_weights:
            check_split(passes["model"], config)


class SplitStep(Step):
    """A step in which each backward pass sends the gradient of the stage's input before it computes
    weight gradients.

    Attributes:
        left: dict of the weight gradients whose computation the backward pass has postponed. The
            keys are modules with an attribute `later` (such as `Experts.later`), or the weights of
            linear layers.
        embeddings: ids of the token embedding parameters on the current stage.
    """

    def run(self) -> list[Any]:
        """Run the step. See `Step`."""
        layers, native = tensor_parallel.layers, getattr(tensor_parallel.layers, LINEAR)
        experts: list[Any] = [each for each in self.model.modules() if hasattr(each, "later")]
        self.embeddings = {id(p) for each in self.model.modules()
                           if isinstance(each, tensor_parallel.VocabParallelEmbedding)
                           for p in each.parameters(recurse=False)}
        self.left: dict[Any, LaterGrads] = {each: LaterGrads() for each in experts}
        try:
            for each in experts:
                each.later = self.left[each]
            setattr(layers, LINEAR, update_wrapper(partial(self._linear, native), native))
            return super().run()
        finally:
            setattr(layers, LINEAR, native)
            for each in experts:
                each.later = None

    def finish_backward(self) -> None:
        """Compute the postponed weight gradients. See `Step`."""
        for owner, later in self.left.items():
            later.compute({"": owner} if isinstance(owner, Tensor) else
                          dict(owner.named_parameters(recurse=False)), hooks=True)

    def _linear(self, native: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Any,
                **settings: Any) -> Tensor:
        # Megatron's own function is used in three cases: in the first pass of a recomputed layer,
        # which has no gradients; for an input without a gradient; and for tied embeddings, because
        # with multi-token prediction both of their uses may be on this stage
        if not (torch.is_grad_enabled() and input.requires_grad) or id(weight) in self.embeddings:
            return native(input, weight, bias, **settings)
        ranks = settings.get("tp_group") or ps.get_tensor_model_parallel_group()
        gathers = settings["sequence_parallel"]

        def leave(x: Tensor, grad_y: Tensor) -> None:
            self.left.setdefault(weight, LaterGrads()).add(lambda: {"": _rows(grad_y).t().matmul(
                _rows(mappings._gather_along_first_dim(x, ranks) if gathers else x))})

        return _Linear.apply(input, weight.detach(), bias, leave, ranks, gathers,
                             settings["allreduce_dgrad"])


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().flatten(0, -2)


class _Linear(torch.autograd.Function):
    """Autograd function that replaces Megatron's linear function `LINEAR`, but does not compute the
    gradient of the weight.

    The forward pass and the gradient of the input use the same operations as in Megatron. The
    backward pass calls `leave` with the input and the gradient of the output.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, leave: Any, ranks: Any,
                gathers: bool, sums: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leave, ctx.ranks, ctx.gathers, ctx.sums = leave, ranks, gathers, sums
        ctx.biased = bias is not None
        y = torch.matmul(mappings._gather_along_first_dim(x, ranks) if gathers else x, weight.t())
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.leave(x, grad_y)
        grad_x = grad_y.matmul(weight)
        if ctx.gathers:
            grad_x = mappings._reduce_scatter_along_first_dim(grad_x, ctx.ranks)
        elif ctx.sums:
            grad_x = mappings._reduce(grad_x, ctx.ranks)
        return (grad_x, None, _rows(grad_y).sum(dim=0) if ctx.biased else None,
                *[None] * 4)


def check_split(model: Any, config: Any) -> None:
    """Raise a `ValueError` if a weight or a setting of Megatron prevents a split backward pass."""
    split = f"{EagerSchedule.name}, pipeline.delay_weights=True"
    DELAYED_WEIGHTS.refuse(vars(config))
    for module in nn.ModuleList(model if isinstance(model, list) else [model]).modules():
        cls = type(module)
        engine = any("transformer_engine" in each.__module__.split(".") for each in cls.__mro__)
        if engine and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            refuse(split, "a layer of Transformer Engine", cls.__name__, "one of Megatron's own",
                   "use --transformer-impl local, or leave out --pipeline-delay-weights")
        if getattr(module, "gtp_remat_size", 1) > 1 or any(
                hasattr(p, "__fsdp_param__") for p in module.parameters(recurse=False)):
            refuse(split, "weights that are split over replicas, in", cls.__name__, "whole",
                   "leave out --use-megatron-fsdp, or --pipeline-delay-weights")
