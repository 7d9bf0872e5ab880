"""Adapter that makes Megatron's own router usable as a router of this package."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.aux_losses import router_losses, weighed_by_tokens
from moe_plugin.hosts.megatron.losses import AuxiliaryLosses, Count, wanted
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing import RouterModule


class NativeRouter(RouterModule):
    """A router that calls a Megatron router, and converts the returned tuple (probs, routing_map)
    to a `Routing`.

    Megatron's router logs its losses itself. The router also attaches its losses to the
    probabilities, so that the backward pass computes their gradients. `Routing.losses` contains
    only the values of these losses, without gradients. The keys of `Routing.losses` are the names
    in Megatron's log. Megatron's router does not return the distribution of its scores. The entropy
    is therefore computed from the normalised weights of the selected experts.

    Args:
        native: Megatron's router.
        top_k: number of experts per token.
        balances: True if Megatron's router balances the load, through a loss or in another way.
        losses: the layer's `AuxiliaryLosses` if the layer shares its tokens with other ranks, or
            None if the current rank has all tokens.
    """

    def __init__(self, native: nn.Module, top_k: int, balances: bool = True,
                 losses: AuxiliaryLosses | None = None) -> None:
        super().__init__()
        self.native, self.top_k, self.balances = native, top_k, balances
        self.losses = losses
        # number of sequences in the next call; the layer sets it for losses per sequence
        self.batch_size = 1

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None,
                top_k: int | None = None, info: TokenInfo | None = None) -> Routing:
        """Route T tokens, where T is S * batch_size. The tokens must be in Megatron's order: the
        tokens of all sequences at one position precede the tokens at the next position.

        Args:
            x_TD: the tokens.
            mask_T: bool tensor that is True for real tokens and False for padding tokens.
            top_k: None, or the number of experts per token with which the router was configured.
                Megatron's router does not support any other number.
            info: ignored.
        """
        if top_k not in (None, self.top_k):
            raise ValueError(
                f"top_k={top_k} cannot be used with Megatron's own router, which is configured "
                f"with {self.top_k} experts per token. Pass None.")
        padding_SB = None if mask_T is None else ~mask_T.view(-1, self.batch_size)
        x_SBD = x_TD.view(-1, self.batch_size, x_TD.shape[-1])
        notes: Any = nullcontext({}) if torch.compiler.is_compiling() else router_losses()
        with self._weighed(x_TD.shape[0] if mask_T is None else mask_T.sum()), notes as losses:
            probs_TE, map_TE, undropped = core.call_native_router(self.native, x_SBD, padding_SB)
        probs_TE = probs_TE.view(-1, probs_TE.shape[-1])
        return _as_routing(probs_TE, map_TE.view(probs_TE.shape).bool(), undropped, mask_T,
                           self.top_k, losses)

    def _weighed(self, tokens: Count) -> AbstractContextManager[None]:
        losses = self.losses
        if losses is None or not losses.config.calculate_per_token_loss or not wanted(self) or (
                not core.is_native_router(self.native)):
            return nullcontext()
        return weighed_by_tokens(self.native, tokens, losses.tokens(tokens), losses.ranks.size())


def _as_routing(probs_TE: Tensor, map_TE: Tensor, undropped: core.Undropped | None,
                mask_T: Tensor | None, top_k: int, losses: dict[str, Tensor]) -> Routing:
    # chosen experts have a probability >= 0; -1 marks the others
    before_TE, chosen_TE = (probs_TE.detach(), map_TE) if undropped is None else (
        undropped.probs_TE, undropped.map_TE)
    best_TK, ids_TK = torch.where(chosen_TE, before_TE.float(), -1.0).topk(top_k, dim=1)
    real_T = torch.ones_like(map_TE[:, 0]) if mask_T is None else mask_T
    chosen_TK = (best_TK >= 0) & real_T[:, None]
    # a map padded to capacity also contains experts that were not chosen
    kept_TK = chosen_TK if undropped is None else chosen_TK & map_TE.gather(1, ids_TK)
    weights_TK = probs_TE.gather(1, ids_TK).to(torch.promote_types(probs_TE.dtype,
                                                                   torch.float32)) * kept_TK
    entropy = _entropy(weights_TK.detach() if undropped is None else best_TK * chosen_TK, real_T)
    return Routing(
        ids_TK=ids_TK.masked_fill(~kept_TK, -1), weights_TK=weights_TK, priority_T=best_TK[:, 0],
        losses=losses, entropy=entropy, tokens=real_T.sum(),
        undropped_TK=None if undropped is None else ids_TK.masked_fill(~chosen_TK, -1),
        capacity=None if undropped is None else undropped.capacity)


def _entropy(weights_TK: Tensor, real_T: Tensor) -> Tensor:
    share_TK = weights_TK / weights_TK.sum(
        1, keepdim=True).clamp(min=torch.finfo(weights_TK.dtype).tiny)
    entropy_T = -(share_TK * share_TK.clamp(min=torch.finfo(weights_TK.dtype).tiny).log()).sum(1)
    return entropy_T.sum() / real_T.sum().clamp(min=1)
