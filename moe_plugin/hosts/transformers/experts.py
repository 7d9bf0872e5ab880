"""The experts of a module of `transformers`, computed by our kernels where its parameters are.

`transformers` stores the stack of all experts in `gate_up_proj` (or `up_proj`) and `down_proj`, the
output axis first unless `is_transposed`; gate and up in halves, or alternating unless
`is_concatenated` (`integrations/moe.py` of transformers 5).
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
from moe_plugin.experts.matrices import of_transformers
from moe_plugin.hosts.transformers.compat import apply_gate, has_its_own_gate
from moe_plugin.kernels.activations import ACTIVATIONS, first_derivative_only
from moe_plugin.kernels.expert_ffn import apply_to_rows, grouped, strategies
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import ExpertRows, ParameterRequest, RowCounts
from moe_plugin.utils.messages import first_process, warn_once

_SAME = 1e-6  # of two activations' values
_LARGE = torch.logspace(-3, 4, 29)  # an activation may be another one's, cut off
_POINTS = torch.cat([torch.linspace(-6, 6, 97), _LARGE, -_LARGE])


def activation_of(module: nn.Module) -> str | None:
    """The name in `ACTIVATIONS` of what a module of experts computes between its two products;
    None: it computes something else (a clamped gate, an activation of another form).
    """
    if module.has_gate and has_its_own_gate(module) or module.has_post_expert_norm:
        return None
    x = _POINTS
    try:
        with torch.no_grad():
            wanted = module.act_fn(x)
    except (TypeError, RuntimeError):  # of two arguments, or with parameters elsewhere
        return None
    for name, act in ACTIVATIONS.items():
        if wanted.shape == x.shape and torch.allclose(act.value(x), wanted, atol=_SAME, rtol=_SAME):
            return name
    return None


def check_module(module: nn.Module) -> None:
    """`ValueError` unless a module of experts says how its weights lie, in floating-point numbers
    that are multiplied as they are.
    """
    dtype = None
    if of_transformers(module):
        dtype = first_stack(module).dtype
        if dtype.is_floating_point and dtype.itemsize >= 2:
            return
    what = f"has weights of {dtype}" if dtype else "is not decorated by use_experts_implementation"
    raise ValueError(
        f"{type(module).__name__} {what}: must be experts in 16 bits or more, stacked as "
        "those of transformers; load the model without quantization, or by another implementation")


def experts_of(module: nn.Module, config: MoEConfig, placement: Placement) -> Experts:
    """What computes a module's experts on this rank.

    The module's own form is computed by torch's grouped products, which takes no layout that
    gathers or borrows parameters; a line in the log says so once for each kind of module.

    Raises:
        ValueError: this rank stores another number of experts than `placement` says, or settings
            are for kernels that do not compute a form of its own.
    """
    name, stored = type(module).__name__, first_stack(module).shape[0]
    if stored != placement.local:
        raise ValueError(
            f"{name} has {stored} experts on this rank: must be {placement.local} of "
            f"{placement.experts} on {placement.comm.size} ranks; spread the model by "
            "DistributedConfig of transformers, and leave parallel.shards out")
    if activation_of(module) is not None:
        return ModuleExperts(module, config, placement)
    where = f"where {name} computes its experts in a form of its own"
    config.experts.read_where(False, where, "use it for another model", "compute",
                              "compute_selection", "precision", "recompute_activation")
    if first_process():
        warn_once(__name__, f"{name} computes its experts in a form of its own: by torch's grouped "
                            "products, not by kernels of moe-plugin")
    return OwnFormExperts(module)


class _Halves(torch.autograd.Function):
    """Gate and up of one stack as views; backward writes the stack's gradient in one pass."""

    @staticmethod
    def forward(ctx: Any, both_LDF: Tensor, concatenated: bool) -> tuple[Tensor, Tensor]:
        ctx.concatenated = concatenated
        return _halves(both_LDF, concatenated)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, gate_LDF: Tensor, up_LDF: Tensor) -> tuple[Tensor, None]:
        shape = (*gate_LDF.shape[:-1], 2 * gate_LDF.shape[-1])
        if gate_LDF.dim() == 3 and gate_LDF.stride(1) == 1:  # as the stack lies
            both_LDF = gate_LDF.new_empty(shape[0], shape[2], shape[1]).transpose(1, 2)
        else:
            both_LDF = gate_LDF.new_empty(shape)
        for half, value in zip(_halves(both_LDF, ctx.concatenated), (gate_LDF, up_LDF),
                               strict=True):
            half.copy_(value)
        return both_LDF, None


def _halves(both: Tensor, concatenated: bool) -> tuple[Tensor, Tensor]:
    """(gate, up) along the last axis."""
    if concatenated:
        gate, up = both.chunk(2, -1)
        return gate, up
    return both[..., ::2], both[..., 1::2]


def _input_first(module: nn.Module, weight: Tensor) -> Tensor:
    """[L, I, O] of a stack of a module's matrices."""
    return weight if module.is_transposed else weight.transpose(1, 2)


class ModuleExperts(FFNExperts):
    """`FFNExperts` that stores nothing: each call reads the parameters that the module has then,
    which may be gathered ones or this rank's part of a DTensor.

    Args:
        module: decorated by `use_experts_implementation`; it has one of `ACTIVATIONS`.
    """

    def __init__(self, module: nn.Module, config: MoEConfig, placement: Placement) -> None:
        Experts.__init__(self)
        self.module = (module,)  # in a tuple, so that it is not a part of this one
        self.config, self.placement = config.experts, placement
        self.compute = strategies.get(config.experts.compute)
        self.adds_to_main_grad, self.memory = False, Workspace()

    @property
    def anchor(self) -> nn.Parameter | None:
        """See `Experts`."""
        return _anchor(self.module[0])

    @property
    def w_in_LDF(self) -> Tensor:  # type: ignore[override]
        """Of this shape and dtype; not to compute with."""
        module = self.module[0]
        stack = _input_first(module, first_stack(module).detach())
        return _halves(stack, True)[1] if module.has_gate else stack

    def local_parameters(self) -> dict[str, Tensor]:
        """See `Experts`: views of the module's parameters."""
        module, found = self.module[0], {}
        first = _input_first(module, first_stack(module))
        if module.has_gate:
            found["w_gate_LDF"], found["w_in_LDF"] = _Halves.apply(first, module.is_concatenated)
        else:
            found["w_in_LDF"] = first
        found["w_out_LFD"] = _input_first(module, module.down_proj)
        if module.has_bias:
            if module.has_gate:
                found["bias_gate_LF"], found["bias_in_LF"] = _Halves.apply(
                    module.gate_up_proj_bias, module.is_concatenated)
            else:
                found["bias_in_LF"] = module.up_proj_bias
            found["bias_out_LD"] = module.down_proj_bias
        return found


class OwnFormExperts(Experts):
    """Experts whose module says what is between the two products: `_apply_gate`, `act_fn`,
    `post_expert_norm`.
    """

    def __init__(self, module: nn.Module) -> None:
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


def stacks_read_once(module: nn.Module) -> AbstractContextManager[None]:
    """Compute parametrized stacks, such as those that `peft` adapts, once in a call, and in the
    same order in every call: `torch.utils.checkpoint` compares what autograd saves in a forward
    pass with what it saves in the recomputation.
    """
    found: Any = module._modules.get("parametrizations")
    return nullcontext() if found is None else _read_once(module, list(found))


@contextmanager
def _read_once(module: nn.Module, names: list[str]) -> Iterator[None]:
    with parametrize.cached():
        for name in names:
            getattr(module, name)
        yield


def first_stack(module: nn.Module) -> Tensor:
    stack: Tensor = module.gate_up_proj if module.has_gate else module.up_proj
    return stack


def _anchor(module: nn.Module) -> Any:
    values = [p for p in module._parameters.values() if p is not None]
    # adapters keep stacks in modules below; replicas of `nn.DataParallel` have no parameters
    values = values or list(module.parameters()) or [first_stack(module)]
    return next((p for p in values if p.requires_grad), values[0])
