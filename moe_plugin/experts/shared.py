"""The shared expert, the latent projection, and the other terms of a layer's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.config import MoEConfig
from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.expert_ffn import gated
from moe_plugin.kernels.in_blocks import in_pieces, product_in_blocks
from moe_plugin.records import Routing, Tokens
from moe_plugin.utils.tensors import fill_, is_sharded


class DrawnLinear(nn.Linear):
    """A linear layer that is initialized to the same values no matter how its parameters are
    sharded.

    Args:
        std: optional. The standard deviation of the initial weights. If `std` is given, biases are
            initialized to zero. By default, weights and biases are initialized as in
            `torch.nn.Linear`.
    """

    def __init__(self, *args: Any, std: float | None = None, **options: Any) -> None:
        self.std = std
        super().__init__(*args, **options)

    def reset_parameters(self) -> None:
        """Draw the initial values of the full parameters, and store the shard of this rank."""
        if is_sharded(self.weight):
            # each rank draws the whole layer, so that values do not depend on the sharding
            whole = DrawnLinear(self.in_features, self.out_features, self.bias is not None,
                                std=self.std, dtype=self.weight.dtype, device=self.weight.device)
            for parameter, drawn in zip(self.parameters(), whole.parameters(), strict=True):
                fill_(parameter, drawn)
            return
        super().reset_parameters()
        if self.std is not None:
            nn.init.normal_(self.weight, 0.0, self.std)
            if self.bias is not None:
                nn.init.zeros_(self.bias)


class BlockLinear(DrawnLinear):
    """A linear layer whose output for a row does not depend on the other rows in the batch.

    See `kernels.in_blocks`.
    """

    def forward(self, x_TI: Tensor) -> Tensor:
        """Apply the linear layer to an input of shape [T, I]. The output has the shape [T, O]."""
        y_TO = product_in_blocks(x_TI, self.weight.T)
        return y_TO if self.bias is None else y_TO + self.bias.to(y_TO.dtype)


def linear_of(config: MoEConfig) -> type[DrawnLinear]:
    """Return the class of linear layers to use for a value of the setting `batch_invariant`."""
    return BlockLinear if config.batch_invariant else DrawnLinear


class SharedExpert(nn.Module):
    """An expert that processes every token, except padding.

    The parameters of the shared expert are replicated on all ranks.
    """

    def __init__(self, config: MoEConfig, *, dtype: torch.dtype | None = None,
                 device: Any = None) -> None:
        super().__init__()
        inner, width = config.experts.shared_hidden_dim, config.model_dim
        linear = linear_of(config)
        options = {"bias": config.experts.bias, "std": config.experts.init_std, "dtype": dtype,
                   "device": device}
        self.activation = ACTIVATIONS[config.experts.activation].value
        self.sigmoid = torch.sigmoid
        if config.batch_invariant:
            self.activation, self.sigmoid = map(in_pieces, (self.activation, torch.sigmoid))
        self.fc_in = linear(width, inner, **options)
        self.dropout, self.overlap = config.experts.dropout, config.experts.shared_overlap
        self.clamp, self.offset = config.experts.clamp, config.experts.linear_offset
        has_gate = config.experts.kind == "gated_ffn"
        self.fc_gate = linear(width, inner, **options) if has_gate else None
        self.fc_out = linear(inner, width, **options)
        self.gate = None
        if config.experts.shared_gate:
            self.gate = linear(width, 1, bias=False, dtype=dtype, device=device)

    @classmethod
    def of(cls, config: MoEConfig, **where: Any) -> SharedExpert | None:
        """Build the shared expert, or return None if the settings do not specify a shared expert.
        """
        return cls(config, **where) if config.experts.shared_hidden_dim else None

    def forward(self, x_TD: Tensor, mask_T: Tensor | None) -> Tensor:
        """Compute the outputs of the shared expert, [T, D], in the dtype of `x_TD`. For padding
        tokens, the outputs are zero.

        Args:
            x_TD: the tokens, [T, D].
            mask_T: bool [T], True for tokens that are not padding. None if there is no padding.
        """
        if mask_T is not None:
            # Inputs are masked, too: padding may contain NaN, which would otherwise reach the
            # gradients of the weights.
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
        inner_TF = self.fc_in(x_TD)
        if self.fc_gate is None:
            inner_TF = self.activation(inner_TF)
        else:
            inner_TF = gated(self.activation, self.fc_gate(x_TD), inner_TF, self.clamp, self.offset)
        inner_TF = F.dropout(inner_TF, self.dropout, self.training)
        y_TD = self.fc_out(inner_TF)
        if self.gate is not None:
            y_TD = self.sigmoid(self.gate(x_TD)) * y_TD
        y_TD = y_TD.to(x_TD.dtype)
        return y_TD if mask_T is None else y_TD.masked_fill(~mask_T[:, None], 0)


class OverlappedWork:
    """Work of a call that does not need the routed experts' outputs, and can therefore overlap with
    the exchange.

    Args:
        shared: the layer's shared expert, or None.
        tokens: the tokens of the call.
        more: another function to run during the exchange, passed by the caller of the layer, or
            None.
    """

    def __init__(self, shared: SharedExpert | None, tokens: Tokens,
                 more: Callable[[], object] | None) -> None:
        self.shared, self.tokens, self.more = shared, tokens, more
        self._shared_TD: Tensor | None = None

    def __call__(self) -> None:
        """Run the work. This method runs after the rows have been sent to their experts."""
        if self.shared is not None and self.shared.overlap:
            self.shared_TD()
        if self.more is not None:
            self.more()

    def shared_TD(self) -> Tensor | None:
        """Return the outputs of the shared expert, [T, D], or None if the layer has none.

        The outputs are computed only once per call.
        """
        # may have been computed by `__call__` while the rows were sent
        if self._shared_TD is None and self.shared is not None:
            self._shared_TD = self.shared(self.tokens.x_TD, self.tokens.mask_T)
        return self._shared_TD


def add_residual(y_TD: Tensor, tokens: Tokens, routing: Routing,
                 shared_TD: Tensor | None) -> Tensor:
    """Add two terms to the routed experts' outputs: the outputs of the shared expert, and the
    tokens weighted by `passthrough_T`.

    Args:
        y_TD: the outputs of the routed experts, [T, D].
        tokens: the tokens of the call.
        routing: the routing result of the call. `routing.passthrough_T` may be None.
        shared_TD: the outputs of the shared expert, [T, D], or None.
    Returns: the sum, [T, D], in the dtype of the tokens.
    """
    x_TD, mask_T = tokens.x_TD, tokens.mask_T
    y_TD = y_TD.to(x_TD.dtype)
    if shared_TD is not None:
        y_TD = y_TD + shared_TD
    if routing.passthrough_T is not None:
        # Padding may contain NaN, which remains NaN even if it is multiplied by 0.
        real_TD = x_TD if mask_T is None else x_TD.masked_fill(~mask_T[:, None], 0)
        y_TD = y_TD + (routing.passthrough_T[:, None] * real_TD).to(x_TD.dtype)
    return y_TD


class LatentProjection(nn.Module):
    """Two linear layers that are shared by all experts: one projects tokens to the latent width,
    and the other projects back.

    `down` projects tokens from width D to the smaller width L. Rows are sent and experts compute in
    width L. `up` projects the combined expert outputs of a token from width L back to width D. The
    router and the shared expert use width D. The parameters of both linear layers are replicated on
    all ranks.
    Source: Elango et al. 2026, LatentMoE, arXiv 2601.18089; Megatron's `--moe-latent-size`.
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
        """Build the projection. Returns None if the settings do not specify a latent projection.

        Args:
            config: the settings of the layer.
            where: the dtype and device of the parameters.
        """
        return cls(config, **where) if config.experts.latent_dim else None

    def enter(self, tokens: Tokens) -> Tensor:
        """Project the tokens of a call from [T, D] to [T, L]."""
        x_TD, mask_T = tokens.x_TD, tokens.mask_T
        if mask_T is not None:
            # padding may contain NaN, which would reach the gradients of the weights
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
        x_TL: Tensor = self.down(x_TD)
        return x_TL

    def leave(self, y_TL: Tensor, tokens: Tokens) -> Tensor:
        """Project combined expert outputs from [T, L] to [T, D], in the dtype of the tokens.

        For padding tokens, the result is zero.
        """
        y_TD: Tensor = self.up(y_TL).to(tokens.x_TD.dtype)
        # Results of padding are zeros, which only a bias changes.
        if tokens.mask_T is None or self.up.bias is None:
            return y_TD
        return y_TD.masked_fill(~tokens.mask_T[:, None], 0)
