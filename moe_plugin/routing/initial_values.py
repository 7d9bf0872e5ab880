"""The mark of router parameters whose initial values a host must keep."""

from __future__ import annotations

from torch import Tensor, nn


def keep_init(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter: a host's own initialisation leaves it as the router made it."""
    parameter.own_init = True  # type: ignore[attr-defined]
    return parameter


def keeps_init(parameter: Tensor) -> bool:
    """Whether `keep_init` marked this parameter."""
    return getattr(parameter, "own_init", False)
