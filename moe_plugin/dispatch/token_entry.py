"""A call's tokens on their way in and out: checks, one axis, sharing between ranks.

Ranks of the expert group may hold the same tokens (tensor parallelism without sequence
parallelism). Parm's schedule S1 pauses tensor parallelism before the gate: each of N ranks takes
1/N of the tokens, routes and sends them like any other rank, and the outputs are gathered. Every
parameter outside the experts then sees a part of the tokens, so its gradient is summed over the N.
Source: Pan et al. 2024 (Parm).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.functional import gather, split, sum_parts
from moe_plugin.records import TokenInfo, Tokens


class TokenEntry:
    """What happens to tokens before they are routed and after their outputs are combined.

    Args:
        model_dim: D, width of a token.
        sharing: ranks that hold the same tokens and share them out (S1); None: each has its own.
    """

    def __init__(self, model_dim: int, sharing: Comm | None) -> None:
        self.model_dim, self.sharing = model_dim, sharing

    def enter(self, x: Tensor, token_mask: Tensor | None, info: TokenInfo | None,
              dtype: torch.dtype | None) -> Tokens:
        """This rank's tokens, on one axis.

        Args:
            x: [..., D].
            token_mask: [...] bool, True = real token.
            info: of the same tokens.
            dtype: that x must have outside autocast; None: any.
        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        self._check(x, token_mask, dtype)
        x_TD = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        info = TokenInfo() if info is None else info.flat()
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        count = x_TD.shape[0]
        if self.sharing is not None:
            x_TD, mask_T = split_tokens(x_TD, mask_T, self.sharing)
            info = info.piece(self.sharing.size, self.sharing.rank)
        return Tokens(x_TD, mask_T, info, x.shape, count)

    def leave(self, y_TD: Tensor, losses: dict[str, Tensor],
              tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs in the input's shape, and losses by name; under S1 all ranks' outputs, and the
        losses as sums of the ranks' parts, both equal on these ranks.
        """
        if self.sharing is not None:
            y_TD = gather(y_TD, self.sharing)[:tokens.count]
            losses = {name: sum_parts(part, self.sharing) for name, part in losses.items()}
        return y_TD if y_TD.shape == tokens.shape else y_TD.view(tokens.shape), losses

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """S1: sum gradients of these parameters, all but the experts', over the sharing ranks.

        Call it again where there may be new ones; it does nothing twice.
        """
        for parameter in parameters if self.sharing is not None else ():
            hooks = (parameter._backward_hooks or {}).values()
            if parameter.requires_grad and self._summed not in hooks:
                parameter.register_hook(self._summed)

    def _summed(self, grad: Tensor) -> Tensor:
        return self.sharing.collectives.all_reduce(self.sharing, grad.contiguous())

    def _check(self, x: Tensor, token_mask: Tensor | None, dtype: torch.dtype | None) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"input of type {type(x).__name__} does not fit: must be a "
                             f"torch.Tensor [..., {self.model_dim}]; use torch.as_tensor(x)")
        if x.dim() < 2 or x.shape[-1] != self.model_dim:
            raise ValueError(f"input of shape {tuple(x.shape)} does not fit: must be "
                             f"[..., {self.model_dim}] (model_dim)")
        if not x.is_floating_point():
            raise ValueError(f"input of dtype {x.dtype} does not fit: must be a floating-point "
                             "tensor")
        if x.is_meta:
            raise ValueError(
                "input on the meta device does not fit: the experts of each token depend on "
                "its values; build the layer there, then move it with to_empty() before the first "
                "forward pass")
        if dtype not in (None, x.dtype) and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"input of dtype {x.dtype} does not fit: must be {dtype}, the experts' "
                "dtype; convert one of the two, or use torch.autocast")
        if token_mask is not None and (token_mask.shape != x.shape[:-1]
                                       or token_mask.dtype != torch.bool):
            raise ValueError(
                f"token_mask {token_mask.dtype} {tuple(token_mask.shape)} does not fit: must be "
                f"bool {tuple(x.shape[:-1])}, True where a token is real")


def split_tokens(x_TD: Tensor, mask_T: Tensor | None,
                 comm: Comm) -> tuple[Tensor, Tensor | None]:
    """This rank's 1/size of tokens [T, D] and mask [T]; padded with masked tokens to a multiple."""
    missing = -x_TD.shape[0] % comm.size
    if missing:
        real_T = x_TD.new_ones(x_TD.shape[0], dtype=torch.bool) if mask_T is None else mask_T
        x_TD, mask_T = F.pad(x_TD, (0, 0, 0, missing)), F.pad(real_T, (0, missing))
    mask_T = None if mask_T is None else mask_T.chunk(comm.size)[comm.rank]
    return split(x_TD, comm), mask_T
