"""Weight gradients added where the host keeps them (Megatron: `gradient_accumulation_fusion`).

Megatron keeps a buffer `parameter.main_grad` (fp32 by default) over the micro-batches of a step.
Its gradient hook adds `parameter.grad` to it, unless `parameter.grad_added_to_main_grad` says that
backward has done so (megatron-core, `tensor_parallel/layers.py` and
`distributed/distributed_data_parallel.py`). Here every contribution to such a weight takes that
way: strategies that can, add their products themselves (`MainGrad`); what comes by another way
(gathered or shadowed experts, other strategies, autocast) is added by `take_over`. So two ways may
meet in one step, or in one backward, and nothing is lost or counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.kernels.derivatives import first_derivative_only
from moe_plugin.kernels.workspace import Workspace

# biases are as small as a row: they take autograd's way
WEIGHTS = ("w_in_LDF", "w_gate_LDF", "w_out_LFD")


def keeps(parameter: Tensor) -> bool:
    """Whether the host keeps this parameter's gradient in `main_grad` and takes what backward adds
    there.

    Not where its hook reads the gradient all the same: Megatron-FSDP's parameters, and those with
    `zero_out_wgrad`.
    """
    if not parameter.requires_grad or not isinstance(getattr(parameter, "main_grad", None), Tensor):
        return False
    return not hasattr(parameter, "__fsdp_param__") and not getattr(parameter, "zero_out_wgrad",
                                                                    False)


@dataclass(frozen=True)
class MainGrad:
    """Where a backward pass adds the gradient of one weight [L, I, O], in place of a tensor to
    return. memory: for temporaries.
    """

    parameter: Tensor
    memory: Workspace

    def add_product(self, expert: int, a_IN: Tensor, b_NO: Tensor) -> None:
        """main_grad[expert] += a b. One expert's product is the largest temporary, and none where
        the dtypes are the same.
        """
        target_IO = self.parameter.main_grad[expert]  # type: ignore[attr-defined]
        if target_IO.dtype == a_IN.dtype:
            target_IO.addmm_(a_IN, b_NO)
        else:  # no CPU product has operands of one dtype and a result of another
            target_IO.add_(
                torch.mm(
                    a_IN, b_NO, out=self.memory.empty("product for main_grad",
                                                      tuple(target_IO.shape), a_IN)))

    def settled(self) -> Tensor | None:
        """See `settled`."""
        return settled(self.parameter)


def settled(parameter: Tensor) -> Tensor | None:
    """What backward returns for a parameter whose gradient lies in `main_grad`: values that nobody
    reads, so that its hooks run.

    None without the host's mark: then nobody waits for a hook.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    # anomaly mode reads them: garbage could be NaN
    return torch.zeros_like(parameter) if torch.is_anomaly_enabled() else torch.empty_like(
        parameter)


class _TakeOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return parameter.view_as(parameter)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        ctx.parameter.main_grad.add_(grad)
        return settled(ctx.parameter)


def take_over(parameter: nn.Parameter) -> Tensor:
    """The parameter, for any use: the gradient of this use is added to `main_grad`."""
    return _TakeOver.apply(parameter)
