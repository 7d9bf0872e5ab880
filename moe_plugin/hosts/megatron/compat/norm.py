"""Layer norm without Apex or Transformer Engine that works with sequence parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_plugin.hosts.megatron.compat.settings import setting

_KINDS = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}


class TorchNorm:
    """Builds torch's `LayerNorm` or `RMSNorm`, marked for Megatron's sequence parallelism.

    Megatron-core's own fallback (`WrappedTorchNorm`) refuses `sequence_parallel`; all that is
    missing there is the mark by which Megatron sums a replicated parameter's gradient over the
    tensor-parallel group.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> nn.Module:  # type: ignore[misc]
        """A norm over the last dimension, `hidden_size` wide. `ValueError` for settings torch's
        norms do not know.
        """
        for name in ("layernorm_zero_centered_gamma", "persist_layer_norm",
                     "memory_efficient_layer_norm"):
            if setting(config, name):
                raise ValueError(
                    f"{name}=True needs Apex or Transformer Engine; install one of them or leave "
                    "it False"
                )
        if config.normalization not in _KINDS:
            raise ValueError(
                f"normalization={config.normalization!r} must be one of {', '.join(_KINDS)} "
                "without Transformer Engine; choose one of these")
        norm = _KINDS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
