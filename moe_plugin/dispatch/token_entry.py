"""Functions that flatten a layer's input to one token axis and restore the shape of the outputs.

Several ranks of the expert-parallel group may have the same tokens, for example with tensor
parallelism but without sequence parallelism. With Parm's schedule S1, N such ranks divide the
tokens before the router: each rank routes and sends 1/N of the tokens, and the outputs are gathered
at the end. With schedule S1, each rank uses only a part of the tokens. The gradient of every
parameter
outside the experts is therefore summed over the N ranks. Source: Pan et al. 2024 (Parm).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from moe_plugin.comm.base import Comm
from moe_plugin.comm.functional import gather, split, sum_parts
from moe_plugin.records import TokenInfo, Tokens


class TokenEntry:
    """A component that prepares the router's input and gives the outputs the shape of the input.

    Args:
        model_dim: width of a token, D.
        sharing: group of ranks that have the same tokens and divide the tokens among themselves
            (schedule S1), or None if each rank has different tokens.
    """

    def __init__(self, model_dim: int, sharing: Comm | None) -> None:
        self.model_dim, self.sharing = model_dim, sharing

    def enter(self, x: Tensor, token_mask: Tensor | None, info: TokenInfo | None,
              dtype: torch.dtype | None) -> Tokens:
        """Check the input, and return this rank's tokens, flattened to one token axis.

        Args:
            x: [..., D], input of the layer.
            token_mask: bool [...], True for real tokens, or None if all tokens are real.
            info: additional information about each token. Optional.
            dtype: dtype that `x` must have outside autocast, or None if any dtype is allowed.
        Raises:
            ValueError: If the input has a wrong shape or a wrong dtype.
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
        """Return the outputs in the shape of the input, and a dict of the losses by name.

        With schedule S1, the outputs of all ranks in `sharing` are gathered and their losses are
        summed, so that outputs and losses are equal on these ranks.
        """
        if self.sharing is not None:
            # cuts off the padding that `split_tokens` has added
            y_TD = gather(y_TD, self.sharing)[:tokens.count]
            losses = {name: sum_parts(part, self.sharing) for name, part in losses.items()}
        return y_TD if y_TD.shape == tokens.shape else y_TD.view(tokens.shape), losses

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """With schedule S1, sum the gradients of the given parameters over the ranks in `sharing`.

        Call this method again whenever parameters may have been replaced. The method registers at
        most one hook per parameter.

        Args:
            parameters: all parameters of the layer except the parameters of the experts.
        """
        for parameter in parameters if self.sharing is not None else ():
            hooks = (parameter._backward_hooks or {}).values()
            # two bound methods of one object are equal, so a hook of an earlier call is found
            if parameter.requires_grad and self._summed not in hooks:
                parameter.register_hook(self._summed)

    def _summed(self, grad: Tensor) -> Tensor:
        assert self.sharing is not None
        return self.sharing.collectives.all_reduce(self.sharing, grad.contiguous())

    def _check(self, x: Tensor, token_mask: Tensor | None, dtype: torch.dtype | None) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"the input is a {type(x).__name__}, but must be a torch.Tensor of "
                             f"shape [..., {self.model_dim}]. Convert it with torch.as_tensor(x)")
        if x.dim() < 2 or x.shape[-1] != self.model_dim:
            raise ValueError(f"the input has shape {tuple(x.shape)}, but the layer expects "
                             f"[..., {self.model_dim}] (model_dim)")
        if not x.is_floating_point():
            raise ValueError(f"the input has dtype {x.dtype}, but must be a floating-point tensor")
        if x.is_meta and not is_in_torch_dispatch_mode():  # as when the planner traces
            raise ValueError(
                "the input is on the meta device, but routing depends on the values of the tokens. "
                "Move the layer to a real device with to_empty() before the first forward pass")
        # autocast converts tokens and weights to one dtype
        if dtype not in (None, x.dtype) and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"the input has dtype {x.dtype}, but the experts have dtype {dtype}. Convert one "
                "of the two, or use torch.autocast")
        if token_mask is not None and (token_mask.shape != x.shape[:-1]
                                       or token_mask.dtype != torch.bool):
            raise ValueError(
                f"token_mask has dtype {token_mask.dtype} and shape {tuple(token_mask.shape)}, but "
                f"must be a bool tensor of shape {tuple(x.shape[:-1])}, True for real tokens")


def split_tokens(x_TD: Tensor, mask_T: Tensor | None,
                 comm: Comm) -> tuple[Tensor, Tensor | None]:
    """Return the part of the tokens [T, D] and of the mask [T] that this rank processes. The part
    contains 1/size of the tokens.

    If T is not a multiple of the group size, the function first appends masked tokens.
    """
    # all ranks need parts of the same size: `gather` concatenates them
    missing = -x_TD.shape[0] % comm.size
    if missing:
        real_T = x_TD.new_ones(x_TD.shape[0], dtype=torch.bool) if mask_T is None else mask_T
        x_TD, mask_T = F.pad(x_TD, (0, 0, 0, missing)), F.pad(real_T, (0, missing))
    mask_T = None if mask_T is None else mask_T.chunk(comm.size)[comm.rank]
    return split(x_TD, comm), mask_T
