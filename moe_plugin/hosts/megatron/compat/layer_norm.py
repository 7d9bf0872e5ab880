"""Norms without Transformer Engine that work with sequence parallelism: apex's or torch's."""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.training.gradients import fused

_KINDS = {"LayerNorm": (fused.LAYER_NORM, nn.LayerNorm), "RMSNorm": (fused.RMS_NORM, nn.RMSNorm)}


class LocalNorm:
    """Builds apex's fused `LayerNorm` or `RMSNorm`, or torch's where apex cannot be used
    (`gradients.fused`), marked for Megatron's sequence parallelism.

    Megatron-core's own choices (`FusedLayerNorm`, `WrappedTorchNorm`) need a GPU once apex is
    installed, have no fused RMS norm, and refuse `sequence_parallel` without apex; all that is
    missing there is the mark by which Megatron sums a replicated parameter's gradient over the
    tensor-parallel group.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> nn.Module:  # type: ignore[misc]
        """A norm over the last dimension, `hidden_size` wide. `ValueError` for settings that
        neither apex's nor torch's norms know.
        """
        for name in ("layernorm_zero_centered_gamma", "persist_layer_norm"):
            if setting(config, name):
                raise ValueError(
                    f"{name}=True needs Megatron's own norms, of Apex or Transformer Engine; "
                    "install one of them or leave it False")
        if config.normalization not in _KINDS:
            raise ValueError(
                f"normalization={config.normalization!r} must be one of {', '.join(_KINDS)} "
                "without Transformer Engine; choose one of these")
        name, kind = _KINDS[config.normalization]
        options, apex = {}, fused.apex(name)
        if setting(config, "memory_efficient_layer_norm"):
            if apex.value is None:
                raise ValueError("memory_efficient_layer_norm=True needs apex or Transformer "
                                 f"Engine ({apex.reason}); install one of them or leave it False")
            options["memory_efficient"] = True
        norm = (apex.value or kind)(hidden_size, eps=eps, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
