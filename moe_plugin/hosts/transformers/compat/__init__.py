"""Access to names of `transformers` that are not part of its stable interface.

This file contains the two registries, and functions that use private settings and methods of
experts modules. If a name moves in a new version of `transformers`, only this file has to change.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import TrainerCallback
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

__all__ = ["ALL_EXPERTS_FUNCTIONS", "EPImplementation", "EPImplementationInterface",
           "TrainerCallback", "apply_gate", "has_its_own_gate", "holds_a_part", "implementation_of"]


def implementation_of(module: Any) -> str | None:
    """Return the name of a module's experts implementation, or None if no name is set."""
    return module.config._experts_implementation


def holds_a_part(module: Any) -> bool:
    """Return True if the experts are distributed over several ranks. If the experts are
    distributed, the expert index `num_experts` stands for any expert on another rank.
    """
    return module._is_expert_parallel


def has_its_own_gate(module: Any) -> bool:
    """Return True if the module's class defines its own gate function instead of using `act_fn`."""
    return type(module)._apply_gate is not _default_apply_gate


def apply_gate(module: Any, inner_RF: Tensor) -> Tensor:
    """Apply the gate between the two matrix products of gated experts, [R, 2F] to [R, F]."""
    return module._apply_gate(inner_RF)
