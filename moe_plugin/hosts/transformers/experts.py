"""Compute the experts of a `transformers` module with the kernels of this package, using the
parameters of the module.

`transformers` stores the weights of all experts as stacks, in `gate_up_proj` (or `up_proj`) and
`down_proj`. In each matrix, the output dimension comes first, unless `is_transposed` is set. If
`is_concatenated` is set, the first half of `gate_up_proj` contains the gate weights, and the second
half contains the up weights. If `is_concatenated` is not set, gate and up weights alternate (see
`integrations/moe.py` in transformers 5).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from moe_plugin.comm.placement import Placement
from moe_plugin.config import MoEConfig
from moe_plugin.experts.base import Experts
from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.experts.gates import named_activation
from moe_plugin.experts.matrices import of_transformers
from moe_plugin.hosts.transformers.compat import apply_gate, has_its_own_gate
from moe_plugin.kernels.activations import first_derivative_only
from moe_plugin.kernels.expert_ffn import apply_to_rows, grouped, strategies
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import ExpertRows, ParameterRequest, RowCounts
from moe_plugin.utils.messages import first_process, warn_once


def activation_of(module: Any) -> str | None:
    """Return the name of the activation function that an experts module uses, as listed in
    `ACTIVATIONS`.

    Return None if the module computes anything else between its two matrix products, for example a
    clamped gate.
    """
    if module.has_gate and has_its_own_gate(module) or module.has_post_expert_norm:
        return None
    return named_activation(module.act_fn)


def check_module(module: Any) -> None:
    """Raise a `ValueError` if an experts module does not declare how its weights are stored.

    The weights must be floating-point numbers with at least 16 bits, and must be usable without
    scaling factors.
    """
    dtype = None
    if of_transformers(module):
        dtype = first_stack(module).dtype
        if dtype.is_floating_point and dtype.itemsize >= 2:
            return
    why = f"has weights of {dtype}" if dtype else "is not decorated by use_experts_implementation"
    raise ValueError(
        f"{type(module).__name__} {why}. Only experts stacked as in transformers with weights of "
        "16 bits or more are supported. Load the model without quantization, or use another "
        "implementation")


def experts_of(module: Any, config: MoEConfig, placement: Placement) -> Experts:
    """Return the object that computes the experts of a module on the current rank.

    Experts with a special activation function or gate are computed by torch's grouped matrix
    product. The grouped matrix product does not support layouts that gather or borrow parameters. A
    log line reports the use of torch's matrix product, once per module class.

    Raises:
        ValueError: If the number of experts on the current rank differs from the number in
            `placement`, or if a setting applies only to the kernels of this package.
    """
    name, stored = type(module).__name__, first_stack(module).shape[0]
    if stored != placement.local:
        raise ValueError(
            f"{name} has {stored} experts on this rank instead of {placement.local} (of "
            f"{placement.experts} on {placement.comm.size} ranks). Distribute the model with "
            "DistributedConfig of transformers, and leave parallel.shards out")
    if activation_of(module) is not None:
        return ModuleExperts(module, config, placement)
    where = f"where {name} uses its own activation or gate"
    config.experts.read_where(False, where, "use it for another model", "compute",
                              "compute_selection", "precision", "recompute_activation")
    if first_process():
        warn_once(__name__, f"the experts of {name} have their own activation or gate, so torch's "
                            "grouped products compute them instead of the kernels of moe-plugin")
    return OwnFormExperts(module)


class _Halves(torch.autograd.Function):
    """Autograd function that splits a stack of weights into a view of the gate weights and a view
    of the up weights. The backward pass writes the gradient of the whole stack at once.
    """

    @staticmethod
    def forward(ctx: Any, both_LDF: Tensor, concatenated: bool) -> tuple[Tensor, Tensor]:
        ctx.concatenated = concatenated
        return _halves(both_LDF, concatenated)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, gate_LDF: Tensor, up_LDF: Tensor) -> tuple[Tensor, None]:
        shape = (*gate_LDF.shape[:-1], 2 * gate_LDF.shape[-1])
        if gate_LDF.dim() == 3 and gate_LDF.stride(1) == 1:  # same memory layout as the stack
            both_LDF = gate_LDF.new_empty(shape[0], shape[2], shape[1]).transpose(1, 2)
        else:
            both_LDF = gate_LDF.new_empty(shape)
        for half, value in zip(_halves(both_LDF, ctx.concatenated), (gate_LDF, up_LDF),
                               strict=True):
            half.copy_(value)
        return both_LDF, None


def _halves(both: Tensor, concatenated: bool) -> tuple[Tensor, Tensor]:
    if concatenated:
        gate, up = both.chunk(2, -1)
        return gate, up
    return both[..., ::2], both[..., 1::2]


def _input_first(module: Any, weight: Tensor) -> Tensor:
    return weight if module.is_transposed else weight.transpose(1, 2)


class ModuleExperts(FFNExperts):
    """A subclass of `FFNExperts` without its own parameters. Each call reads the parameters of a
    `transformers` module.

    The module's parameters may have been gathered from other ranks, or may be the current rank's
    shard of a DTensor.

    Args:
        module: module that is decorated with `use_experts_implementation` and has one of the
            activation functions in `ACTIVATIONS`.
        config: settings of the layer.
        placement: specifies which experts the current rank stores.
    """

    def __init__(self, module: Any, config: MoEConfig, placement: Placement) -> None:
        Experts.__init__(self)
        self.module = (module,)  # a tuple keeps the module from being registered as a submodule
        self.config, self.placement = config.experts, placement
        self.compute = strategies.get(config.experts.compute)
        self.adds_to_main_grad, self.memory = False, Workspace()

    @property
    def anchor(self) -> nn.Parameter | None:
        """See `Experts`."""
        return _anchor(self.module[0])

    @property
    def w_in_LDF(self) -> Tensor:  # type: ignore[override]
        """Return a tensor that has only the shape and dtype of the weights."""
        module = self.module[0]
        stack = _input_first(module, first_stack(module).detach())
        return _halves(stack, True)[1] if module.has_gate else stack

    def local_parameters(self) -> dict[str, Tensor]:
        """Return views of the parameters of the module. See `Experts`."""
        module, stacks = self.module[0], {}
        first = _input_first(module, first_stack(module))
        if module.has_gate:
            stacks["w_gate_LDF"], stacks["w_in_LDF"] = _Halves.apply(first, module.is_concatenated)
        else:
            stacks["w_in_LDF"] = first
        stacks["w_out_LFD"] = _input_first(module, module.down_proj)
        if module.has_bias:
            if module.has_gate:
                stacks["bias_gate_LF"], stacks["bias_in_LF"] = _Halves.apply(
                    module.gate_up_proj_bias, module.is_concatenated)
            else:
                stacks["bias_in_LF"] = module.up_proj_bias
            stacks["bias_out_LD"] = module.down_proj_bias
        return stacks


class OwnFormExperts(Experts):
    """Experts that have a custom function between the two matrix products.

    The module implements this function in `_apply_gate`, `act_fn` and `post_expert_norm`.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = (module,)

    @property
    def anchor(self) -> nn.Parameter | None:
        """See `Experts`."""
        return _anchor(self.module[0])

    def forward(self, work: ExpertRows | ParameterRequest) -> Any:
        """See `Experts`."""
        assert isinstance(work, ExpertRows), "parameters are only asked of experts that gather"
        return apply_to_rows(self._compute, work.x, work.rows)

    def _compute(self, rows_RD: Tensor, counts: RowCounts) -> Tensor:
        module = self.module[0]
        first = "gate_up_proj" if module.has_gate else "up_proj"
        inner = self._product(rows_RD, counts, first)
        inner_RF = apply_gate(module, inner) if module.has_gate else module.act_fn(inner)
        out_RD = self._product(inner_RF, counts, "down_proj")
        return module.post_expert_norm(out_RD) if module.has_post_expert_norm else out_RD

    def _product(self, rows_RI: Tensor, counts: RowCounts, name: str) -> Tensor:
        module = self.module[0]
        bias_LO = getattr(module, f"{name}_bias") if module.has_bias else None
        return grouped(rows_RI, counts, _input_first(module, getattr(module, name)), bias_LO)


def stacks_read_once(module: Any) -> AbstractContextManager[None]:
    """If stacks of weights are parametrized (for example by adapters of `peft`), compute each stack
    only once per call, and in a fixed order.

    The order matters because `torch.utils.checkpoint` compares the tensors that autograd saves in
    the forward pass with those saved in the recomputation.
    """
    parametrized: Any = module._modules.get("parametrizations")
    return nullcontext() if parametrized is None else _read_once(module, list(parametrized))


@contextmanager
def _read_once(module: Any, names: list[str]) -> Iterator[None]:
    with parametrize.cached():
        for name in names:
            getattr(module, name)
        yield


def first_stack(module: Any) -> Tensor:
    stack: Tensor = module.gate_up_proj if module.has_gate else module.up_proj
    return stack


def _anchor(module: Any) -> Any:
    values = [p for p in module._parameters.values() if p is not None]
    # adapters move stacks into submodules, and replicas of `nn.DataParallel` have no parameters
    values = values or list(module.parameters()) or [first_stack(module)]
    return next((p for p in values if p.requires_grad), values[0])
