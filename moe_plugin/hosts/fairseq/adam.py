"""fairseq's Adam by torch's fused kernels."""

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
from moe_plugin.training.gradients import multi_tensor
from moe_plugin.training.gradients.multi_tensor import local
from moe_plugin.training.gradients.replicas import replicas_of


# fairseq's optimizer where the weights of a model stream: one for each block of it, which fairseq
# sees as one, also in checkpoints.
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


_HALF = (torch.float16, torch.bfloat16)


class FusedAdam(torch.optim.Optimizer):
    """`fairseq.optim.adam.Adam` that passes over each parameter's memory once, on CPU and GPU.

    Numbers are equal up to rounding, and so is the state by name, type and dtype (`step`, an int;
    `exp_avg` and `exp_avg_sq` in float32), so that checkpoints fit both. Weight decay is decoupled:
    w -= lr * weight_decay * w. fairseq adds `eps` to the root of the second moment before the
    moment's bias is corrected, torch afterwards: torch is given eps / sqrt(1 - beta2 ** step).

    Parameters in half precision are updated in float32 copies, one after another, as fairseq does,
    and so are those that are not contiguous: torch's kernels for CPUs read all tensors in the order
    of memory, whatever their strides.

    Args:
        params: parameters or groups of them, any floating dtype.
        lr, betas, eps, weight_decay: as in fairseq.
        half: between steps both moments are kept in 16 bits (`_Halves`), 4 bytes of a parameter in
            the place of 8; `state_dict` gives them in float32, and a run that is resumed from it
            goes on with the same bits.
    """

    # fairseq asks its optimizers for these
    supports_memory_efficient_fp16 = True
    supports_flat_params = True

    def __init__(self, params: Iterable[Any], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, half: bool = False) -> None:
        self.half = half
        # amsgrad: a group of fairseq's Adam has it, and may load this one
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay, "amsgrad": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; returns the closure's loss.

        Raises:
            RuntimeError: sparse gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            whole: dict[tuple[torch.device, torch.dtype, int], list[list[Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._counted_state(parameter)
                weight = local(parameter)
                row = [tensor.to(state["exp_avg"].dtype).contiguous() for tensor in (
                    weight, *map(local, (parameter.grad, state["exp_avg"], state["exp_avg_sq"])))]
                if row[0] is weight and not self.half:
                    whole.setdefault((weight.device, weight.dtype, state["step"]), []).append(row)
                    continue
                # alone, so that the moments of no other are in float32
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
        """See `torch.optim.Optimizer`; moments that are kept in halves are given in float32."""
        found = super().state_dict()
        found["state"] = {name: _decoded(state) for name, state in found["state"].items()}
        return found

    def _counted_state(self, parameter: Tensor) -> dict[str, Any]:
        """A parameter's state in this step: moments contiguous and in its precision or float32."""
        if parameter.grad.is_sparse:
            raise RuntimeError("Adam does not take sparse gradients; use another optimizer")
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
    """exp_avg, and the root of exp_avg_sq, whose own range 16 bits do not hold; see `encoded`."""

    average: tuple[Tensor, Tensor]
    root: tuple[Tensor, Tensor]


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in float16 over a unit, and the unit, scalar: the power of two by which the largest
    magnitude comes to lie in (32752, 65504].

    Relative error up to 2^-11, and absolute up to 2^-39 of the largest magnitude. What was decoded
    is encoded without an error. Source: scales of `--fp16-adam-stats` in fairseq (after Jukebox,
    Dhariwal et al. 2020), there any number, and there of exp_avg_sq itself.
    """
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    part, exponent = torch.frexp(largest.float() / torch.finfo(torch.float16).max)
    exponent = (exponent - (part == 0.5).int()).clamp(min=-100)
    unit = torch.ldexp(torch.ones_like(part), exponent)
    return (x / unit).half(), unit


def _decoded(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state with its moments in float32."""
    if "halves" not in state:
        return state
    (average, unit), (root, root_unit) = state["halves"]
    return {"step": state["step"], "exp_avg": average.float() * unit,
            "exp_avg_sq": (root.float() * root_unit).square()}


def _update(rows: list[tuple[Tensor, ...]], step: int, group: dict[str, Any]) -> None:
    weights, gradients, first, second = (list(column) for column in zip(*rows, strict=True))
    beta1, beta2 = group["betas"]
    # torch counts up one tensor per parameter before it computes
    steps = torch.full((len(rows),), float(step - 1), device=weights[0].device)
    adamw(weights, gradients, first, second, [], list(steps.unbind()), foreach=False, fused=True,
          amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
          weight_decay=group["weight_decay"], eps=group["eps"] / math.sqrt(1 - beta2**step))
