"""Names of `transformers` that are not part of its stable interface.

The module contains the two registries, and functions for private settings and methods of experts
modules. If a name moves in a new version of `transformers`, only this file needs a change.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

__all__ = ["ALL_EXPERTS_FUNCTIONS", "EPImplementation", "EPImplementationInterface",
           "TrainerCallback", "apply_gate", "has_its_own_gate", "holds_a_part", "implementation_of"]


def implementation_of(module: nn.Module) -> str | None:
    """Return the name of the module's experts implementation, or None if no caller has set it."""
    return module.config._experts_implementation


def holds_a_part(module: nn.Module) -> bool:
    """Return whether ranks share the experts. Experts of other ranks have the index `num_experts`.
    """
    return module._is_expert_parallel


def has_its_own_gate(module: nn.Module) -> bool:
    """Return whether the module's class defines its own gate instead of using `act_fn`."""
    return type(module)._apply_gate is not _default_apply_gate


def apply_gate(module: nn.Module, inner_RF: Tensor) -> Tensor:
    """Apply the gate between the two products of gated experts: [R, 2F] to [R, F]."""
    return module._apply_gate(inner_RF)
