"""Adam for fairseq with torch's fused kernels, and optimizers for models with streamed weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from moe_plugin.experts.base import is_expert
from moe_plugin.hosts.fairseq.compat.names import (
    FairseqOptimizer,
    FP16Optimizer,
    MemoryEfficientFP16Optimizer,
)
from moe_plugin.memory.weights.blocks import StreamedBlock
from moe_plugin.memory.weights.optimizer_state import state_of
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.training.gradients import fused
from moe_plugin.training.gradients.fused import local
from moe_plugin.training.gradients.replicas import replicas_of


# The optimizers of a model with streamed weights: one per block. fairseq sees them as a single
# optimizer, also in checkpoints.
class BlockOptimizers(FairseqOptimizer):
    """A fairseq optimizer for a model with streamed weights, which wraps one optimizer per block.

    The gradient norm is computed while the forward and backward passes of a step run. The gradients
    are divided by the sample size of the step. In 16-bit training, fairseq's 16-bit optimizer wraps
    this optimizer and divides the gradients.

    Args:
        cfg: settings of the fairseq optimizer.
        trainer: the `StreamedTrainer`. The trainer's blocks must be in the same order as the
            model's parameters.
        stepped: function that is called after each optimizer step.
    """

    supports_step_with_scale = supports_groups = supports_flat_params = False
    supports_memory_efficient_fp16 = False
    disable_mem_eff_fp16_loading_hack = True  # `load_state_dict` preserves the dtypes of a state

    def __init__(self, cfg: Any, trainer: StreamedTrainer, stepped: Callable[[], None]) -> None:
        super().__init__(cfg)
        self.trainer, self.stepped, self.gradient_norm = trainer, stepped, torch.zeros(())

    @property
    def optimizer(self) -> BlockOptimizers:
        """Return this object itself, because a streamed model has no single torch optimizer."""
        return self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizers of all blocks."""
        return self.trainer.param_groups

    def zero_grad(self) -> None:
        """Discard the gradients."""
        self.trainer.forget()

    def multiply_grads(self, c: float | Tensor) -> None:
        """Store a factor. In 16-bit training, the gradients of a block are multiplied by this
        factor when the block is updated.

        In float32 training, this method has no effect, because the gradients have already been
        divided by the sample size.
        """
        clip: Any = self.trainer.clip
        clip.multiply(c)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        """Return the global gradient norm without clipping the gradients. The gradients of each
        block are clipped when the block is updated.
        """
        return self.gradient_norm

    def step(self, closure: Any = None, scale: float = 1.0, groups: Any = None) -> None:
        """Clip the gradients of each block and update the block, one block after another."""
        self.trainer.update()
        self.stepped()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of a single optimizer for the whole model."""
        self.trainer.settle()
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for block, first in self._with_optimizers():
            assert block.optimizer is not None
            block_state = block.optimizer.state_dict()
            groups = groups or [{**block_state["param_groups"][0], "params": []}]
            for i, values in block_state["state"].items():
                state[first + i] = dict(values)
            for (i, name), x in block.state_tensors().items():
                state[first + i][name] = x
            groups[0]["params"] += range(first, first + len(block.trained))
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any],
                        optimizer_overrides: Mapping[str, Any] | None = None) -> None:
        """Load a state that `state_dict` returned, or that of a single optimizer for the whole
        model.

        Raises:
            ValueError: If the number of parameters in the state differs from that of the model.
        """
        [group], state = state_dict["param_groups"], state_dict["state"]
        saved, expected = len(group["params"]), sum(len(b.trained) for b in self.trainer.blocks)
        if saved != expected:
            raise ValueError(f"the checkpoint's optimizer has {saved} parameters, but this model "
                             f"has {expected}. Use --reset-optimizer")
        self.trainer.settle()
        for block, first in self._with_optimizers():
            numbers = range(len(block.trained))
            # torch stores the tensors it gets, so the file's tensors must be copied
            copied = {i: {name: x.clone() if isinstance(x, Tensor) else x
                          for name, x in state[first + i].items()}
                      for i in numbers if first + i in state}
            assert block.optimizer is not None
            block.optimizer.load_state_dict({
                "state": copied, "param_groups": [{**group, "params": list(numbers)}]})
            # torch has cast the state to the dtype of its parameter: load the original dtypes
            block.load_state({key: copied[key[0]][key[1]] for key in state_of(block.optimizer)})
        for param_group in self.param_groups:
            param_group.update(optimizer_overrides or {})

    def _with_optimizers(self) -> Iterator[tuple[StreamedBlock, int]]:
        """Yield each trained block and the number of trained parameters before it."""
        first = 0
        for block in self.trainer.blocks:
            if block.optimizer is not None:
                yield block, first
            first += len(block.trained)


class _DropsGradients:
    """Mixin for fairseq's 16-bit optimizers: `zero_grad` also clears the gradients of blocks."""

    blocks: Any

    def zero_grad(self: Any) -> None:
        """Discard the gradients stored by fairseq and by the blocks."""
        self.blocks.zero_grad()
        super().zero_grad()  # type: ignore[misc]  # of fairseq's optimizer


def in_16_bits(cfg: Any, blocks: BlockOptimizers) -> FairseqOptimizer:
    """Wrap the blocks' optimizers in fairseq's 16-bit optimizer, which contains a loss scaler.

    The blocks store the float32 copies of the weights.
    """
    efficient = memory_efficient(cfg)
    base = MemoryEfficientFP16Optimizer if efficient else FP16Optimizer
    # checkpoints store the name of the class, and fairseq compares it when it loads them
    named = type(base.__name__, (_DropsGradients, base), {"blocks": blocks})
    return named(cfg, [], blocks) if efficient else named(cfg, [], blocks, [])


def memory_efficient(cfg: Any) -> bool:
    """Return True if 16-bit weights are trained without float32 copies."""
    return cfg.common.memory_efficient_fp16 or cfg.common.memory_efficient_bf16


class FairseqNorm:
    """Gradient clipping that is bitwise equal to fairseq's own clipping in a single process.

    Implements `memory.weights.streamed.Clip`. The global gradient norm is computed from the norms
    of the dense gradients and the sum of squares of all expert gradients.

    Args:
        max_norm: upper bound for the global gradient norm, or 0 to disable clipping.
        size: function that returns the sample size of the step. The gradients are divided by this
            sample size. The function is called after the forward and backward passes of the last
            block are complete. If None (in 16-bit training), the gradients are multiplied by the
            factor passed to `multiply`, and are not clipped.
    """

    def __init__(self, max_norm: float, size: Callable[[], float] | None) -> None:
        self.max_norm, self.size = float(max_norm), size
        self.forget()

    def forget(self) -> None:
        """Discard all norms that `add` has collected."""
        self._dense: dict[int, list[Tensor]] = {}
        self._experts = fused.SquaredNorm()
        self._factor, self._product = 1.0, 1.0  # type: float, float | Tensor

    @torch.no_grad()
    def add(self, place: int, parameters: Sequence[nn.Parameter]) -> None:
        """Divide a block's gradients by the sample size of the step, and collect their norms.

        place: index of the block.
        """
        owners = [(p, p.grad) for p in parameters if p.grad is not None]
        if self.size is not None:
            fused.scale_([grad for _, grad in owners], 1 / self.size())
        experts = [(p, grad) for p, grad in owners if is_expert(p)]
        self._experts.add(place, [grad for _, grad in experts],
                          [replicas_of(p) for p, _ in experts])
        self._dense[place] = [torch.norm(grad, p=2, dtype=torch.float32) for p, grad in owners
                              if not is_expert(p)]

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the global gradient norm as a float32 scalar."""
        norms = [norm for place in sorted(self._dense) for norm in self._dense[place]]
        dense = norms[0] if len(norms) == 1 else torch.norm(torch.stack(norms))
        squared = dense.double()**2 + self._experts.total(dense.device)
        total = squared.sqrt().to(dense.dtype)
        factor = float((self.max_norm / (total + 1e-6)).clamp(max=1)) if self.max_norm > 0 else 1.0
        self.forget()
        self._factor = factor
        return total

    def multiply(self, factor: float | Tensor) -> None:
        """Set the factor that `scale` applies in 16-bit training."""
        if self.size is None:
            self._product = factor

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Scale these gradients down if the global gradient norm exceeds `max_norm`. If the norm is
        NaN, these gradients become NaN.
        """
        if self.size is None:
            fused.scale_(gradients, self._product)
            return
        if math.isnan(self._factor) or self._factor < 1:
            fused.scale_(gradients, self._factor)


_HALF = (torch.float16, torch.bfloat16)


class FusedAdam(torch.optim.Optimizer):
    """A version of `fairseq.optim.adam.Adam` that reads and writes the memory of each parameter
    only once. `FusedAdam` runs on CPU and GPU.

    The updated parameters equal those of fairseq's Adam up to rounding errors. The state has the
    same names, types and dtypes as in fairseq (`step` as an int, `exp_avg` and `exp_avg_sq` in
    float32). Each of the two optimizers can therefore load checkpoints that the other one wrote.
    Weight decay is decoupled (`w -= lr * weight_decay * w`). fairseq adds `eps` to the square root
    of the second moment before it applies the bias correction, whereas torch adds `eps` after the
    correction. To compensate for this difference, `eps / sqrt(1 - beta2 ** step)` is passed to
    torch.

    As in fairseq, half-precision parameters are updated one by one, in float32 copies.
    Non-contiguous parameters are also updated one by one, because torch's CPU kernels ignore
    strides and read all tensors in memory order.

    Args:
        params: parameters or parameter groups of any floating-point dtype.
        lr: learning rate, as in fairseq.
        betas: decay rates of the two moments, as in fairseq.
        eps: constant added to the denominator, as in fairseq.
        weight_decay: factor of decoupled weight decay, as in fairseq.
        half: True to store both moments in 16 bits between steps (see `_Halves`). The two moments
            together then need 4 instead of 8 bytes per parameter. `state_dict` still returns the
            moments in float32. Resuming from a checkpoint restores 16-bit moments bitwise.
    """

    # attributes that fairseq reads from its optimizers
    supports_memory_efficient_fp16 = True
    supports_flat_params = True

    def __init__(self, params: Iterable[Any], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, half: bool = False) -> None:
        self.half = half
        # groups of fairseq's Adam have the key amsgrad, and fairseq may load this state
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay, "amsgrad": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Return the loss that the closure computed.

        Raises:
            RuntimeError: If the gradient of a parameter is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            whole: dict[tuple[torch.device, torch.dtype, int], list[tuple[Tensor, ...]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._counted_state(parameter)
                weight = local(parameter)
                row = tuple(tensor.to(state["exp_avg"].dtype).contiguous() for tensor in (
                    weight, *map(local, (parameter.grad, state["exp_avg"], state["exp_avg_sq"]))))
                if row[0] is weight and not self.half:
                    whole.setdefault((weight.device, weight.dtype, state["step"]), []).append(row)
                    continue
                # one parameter at a time, so that only its moments exist in float32
                _update([row], state["step"], group)
                if row[0] is not weight:
                    weight.copy_(row[0])
                if self.half:
                    self.state[parameter] = {
                        "step": state["step"],
                        "halves": _Halves(encoded(row[2]), encoded(row[3].sqrt()))}
            for (*_, step), rows in whole.items():
                _update(rows, step, group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state, with 16-bit moments converted to float32."""
        result = super().state_dict()
        result["state"] = {name: _decoded(state) for name, state in result["state"].items()}
        return result

    def _counted_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter for the current step, after incrementing the step count.

        The moments are contiguous tensors. The moments are stored in float32, or in the dtype of
        the parameter if this dtype is more precise.
        """
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise RuntimeError("Adam does not support sparse gradients. Use another optimizer")
        state = _decoded(self.state[parameter])
        dtype = torch.float32 if parameter.dtype in _HALF else parameter.dtype
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter, dtype=dtype),
                         exp_avg_sq=torch.zeros_like(parameter, dtype=dtype))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(parameter.device, dtype).contiguous()
        state["step"] += 1
        return state


class _Halves(NamedTuple):
    """The first moment `exp_avg` and the square root of the second moment `exp_avg_sq`, stored in
    16 bits. See `encoded`.

    The square root is stored because `exp_avg_sq` itself has a larger range than a 16-bit type.
    """

    average: tuple[Tensor, Tensor]
    root: tuple[Tensor, Tensor]


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode `x` as float16 values and one scale factor, called the unit.

    The unit is a power of two. After division by the unit, the largest magnitude is in (32752,
    65504]. The relative error is at most 2^-11, and the absolute error is at most 2^-39 times the
    largest magnitude. Decoding values and encoding them again causes no additional error. This
    encoding is based on the scales of `--fp16-adam-stats` in fairseq (after Jukebox, Dhariwal et
    al., 2020). fairseq's scales, however, can be any number, and are applied to `exp_avg_sq` itself
    instead of its square root.
    """
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    part, exponent = torch.frexp(largest.float() / torch.finfo(torch.float16).max)
    exponent = (exponent - (part == 0.5).int()).clamp(min=-100)
    unit = torch.ldexp(torch.ones_like(part), exponent)
    return (x / unit).half(), unit


def _decoded(state: dict[str, Any]) -> dict[str, Any]:
    if "halves" not in state:
        return state
    (average, unit), (root, root_unit) = state["halves"]
    return {"step": state["step"], "exp_avg": average.float() * unit,
            "exp_avg_sq": (root.float() * root_unit).square()}


def _update(rows: list[tuple[Tensor, ...]], step: int, group: dict[str, Any]) -> None:
    weights, gradients, first, second = (list(column) for column in zip(*rows, strict=True))
    beta1, beta2 = group["betas"]
    # torch increments these step counts before it computes
    steps = torch.full((len(rows),), float(step - 1), device=weights[0].device)
    adamw(weights, gradients, first, second, [], list(steps.unbind()), foreach=False, fused=True,
          amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
          weight_decay=group["weight_decay"], eps=group["eps"] / math.sqrt(1 - beta2**step))
