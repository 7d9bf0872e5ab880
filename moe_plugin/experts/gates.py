"""Find the settings with which our experts compute what a `transformers` module computes between
its two matrix products.

The functions are compared by their values, because classes implement the same function in several
ways. A gate without a counterpart is called as it is (`OwnGate`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.expert_ffn import gated

_SAME = 1e-6  # largest accepted difference between the values of two functions
_LARGE = torch.logspace(-3, 4, 29)  # a clipped function differs from ours only at large values
_POINTS = torch.cat([torch.linspace(-6, 6, 97), _LARGE, -_LARGE])
_LIMITS = ("limit", "swiglu_limit")  # attributes that may contain a bound of the values


def named_activation(function: Any) -> str | None:
    """Return the name of a function of one argument, as listed in `ACTIVATIONS`, or None."""
    try:
        with torch.no_grad():
            wanted = function(_POINTS.clone())  # it may write into its argument
    except (TypeError, RuntimeError):  # needs two arguments, or its parameters are on a device
        return None
    return next((name for name, act in ACTIVATIONS.items() if _equal(act.value(_POINTS), wanted)),
                None)


def _equal(values: Tensor, wanted: Tensor) -> bool:
    return wanted.shape == values.shape and torch.allclose(values, wanted, atol=_SAME, rtol=_SAME)


def gate_settings(module: Any) -> dict[str, Any] | None:
    """Return the settings, by dotted path, for the activation and gate of an experts module. Return
    None if no settings compute the same values.
    """
    own = getattr(module, "_apply_gate", None)
    if own is None or not getattr(module, "has_gate", True):
        act = module.mlp.activation_fn if hasattr(module, "mlp") else module.act_fn
        name = named_activation(act)
        return None if name is None else {"experts.activation": name}
    gate, up = (points.flatten() for points in torch.meshgrid(_POINTS, _POINTS, indexing="ij"))
    with torch.no_grad():
        wanted = OwnGate(module)(gate[:, None], up[:, None])[:, 0]
    limits = {float(getattr(module, name, 0.0) or 0.0) for name in _LIMITS}
    for name, act in ACTIVATIONS.items():
        for clamp in sorted(limit for limit in {0.0, *limits} if 0 <= limit <= 1e6):
            for offset in (0.0, 1.0):
                if _equal(gated(act.value, gate, up, clamp, offset), wanted):
                    return {"experts.activation": name, "experts.clamp": clamp,
                            "experts.linear_offset": offset}
    return None


class OwnGate:
    """The gate of an experts module as a function of the gate values and the up values [R, F]."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, gate_RF: Tensor, up_RF: Tensor) -> Tensor:
        """Return the inner values [R, F]."""
        if getattr(self.module, "is_concatenated", True):
            both = torch.cat([gate_RF, up_RF], -1)
        else:
            both = torch.stack([gate_RF, up_RF], -1).flatten(-2)
        inner_RF: Tensor = self.module._apply_gate(both)
        return inner_RF
