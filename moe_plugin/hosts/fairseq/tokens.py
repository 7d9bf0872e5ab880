"""Token ids and sentences for routers and losses that want them (router hash, loss sequence)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.records import TokenInfo


def give_token_ids(stack: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Before each forward pass of an encoder or decoder hand its token ids [B, T] to those MoE
    layers that need them.

    Args:
        stack: fairseq's encoder (`src_tokens`) or decoder (`prev_output_tokens`).
        layers: modules with an attribute `tokens_BT`, and `needs` of their router.
    """
    wanting = [layer for layer in layers if "token_ids" in layer.needs]

    def hand_over(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens_BT = args[0] if args else kwargs.get("prev_output_tokens", kwargs.get("src_tokens"))
        for layer in wanting:
            layer.tokens_BT = tokens_BT

    if wanting:
        stack.register_forward_pre_hook(hand_over, with_kwargs=True)


def token_info(x_TBD: Tensor, tokens_BT: Tensor | None, needs: frozenset[str]) -> TokenInfo | None:
    """What the router needs to know of a batch in fairseq's order; None where it needs nothing.

    tokens_BT: may have more columns than x has positions (incremental decoding): the last ones
    count.
    """
    if not needs:
        return None
    length, sentences = x_TBD.shape[:2]
    ids_TB = tokens_BT[:, -length:].t() if "token_ids" in needs and tokens_BT is not None else None
    sequence_TB = torch.arange(sentences, device=x_TBD.device).expand(
        length, sentences) if "sequences" in needs else None
    return TokenInfo(ids_TB, sequence_TB, sentences)
