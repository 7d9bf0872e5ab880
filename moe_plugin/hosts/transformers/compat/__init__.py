"""Names of `transformers` that are not stable: its two registries, and what it calls a setting or a
method of a module of experts in private. One that moves is one line here.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

__all__ = ["ALL_EXPERTS_FUNCTIONS", "EPImplementation", "EPImplementationInterface",
           "TrainerCallback", "apply_gate", "has_its_own_gate", "holds_a_part", "implementation_of"]


def implementation_of(module: nn.Module) -> str | None:
    """The name under which its experts are computed; None: it is set by no caller."""
    return module.config._experts_implementation


def holds_a_part(module: nn.Module) -> bool:
    """Whether ranks share the experts: choices of another rank's are numbered `num_experts`."""
    return module._is_expert_parallel


def has_its_own_gate(module: nn.Module) -> bool:
    """Whether its class says what is between the two products, in the place of `act_fn`."""
    return type(module)._apply_gate is not _default_apply_gate


def apply_gate(module: nn.Module, inner_RF: Tensor) -> Tensor:
    """What is between the two products of gated experts: [R, 2F] to [R, F]."""
    return module._apply_gate(inner_RF)
