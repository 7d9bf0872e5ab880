"""Experts in a latent width: tokens are projected before they travel, results afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.config import MoEConfig
from moe_plugin.experts.shared import linear_of
from moe_plugin.records import Tokens


class LatentProjection(nn.Module):
    """Two linear maps that all experts share: `down` from the tokens' width D to the width L in
    which rows travel and experts compute, and `up` from the tokens' combined results to D.

    Router and shared expert see the tokens in D. Ordinary, replicated parameters. Source: Elango et
    al. 2026, LatentMoE, arXiv 2601.18089; Megatron's `--moe-latent-size`.
    """

    def __init__(self, config: MoEConfig, *, dtype: torch.dtype | None = None,
                 device: Any = None) -> None:
        super().__init__()
        options = {"bias": config.experts.bias, "std": config.experts.init_std, "dtype": dtype,
                   "device": device}
        linear = linear_of(config)
        self.down = linear(config.model_dim, config.experts.latent_dim, **options)
        self.up = linear(config.experts.latent_dim, config.model_dim, **options)

    @classmethod
    def of(cls, config: MoEConfig, **where: Any) -> LatentProjection | None:
        """The configured projection; None without one. where: dtype and device."""
        return cls(config, **where) if config.experts.latent_dim else None

    def enter(self, tokens: Tokens) -> Tensor:
        """The call's tokens [T, D] as [T, L]."""
        x_TD, mask_T = tokens.x_TD, tokens.mask_T
        if mask_T is not None:  # padding may hold NaN, which would reach the weights' gradients
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
        x_TL: Tensor = self.down(x_TD)
        return x_TL

    def leave(self, y_TL: Tensor, tokens: Tokens) -> Tensor:
        """Combined results [T, L] as [T, D] in the tokens' dtype; zeros for padding."""
        y_TD: Tensor = self.up(y_TL).to(tokens.x_TD.dtype)
        if tokens.mask_T is None or self.up.bias is None:
            return y_TD
        return y_TD.masked_fill(~tokens.mask_T[:, None], 0)
