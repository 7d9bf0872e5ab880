"""Token ids of fairseq's batches, see `moe_plugin.routing.token_ids`."""

from __future__ import annotations

from torch import Tensor, nn

from moe_plugin.routing.token_ids import hand_token_ids


def give_token_ids(stack: nn.Module) -> None:
    """Hand a stack's token ids [B, T] to the MoE layers in it that need them.

    Before each forward pass of an encoder (`src_tokens`) or decoder (`prev_output_tokens`).
    """
    hand_token_ids(stack, "prev_output_tokens", "src_tokens")


def ids_of(length: int, tokens_BT: Tensor | None, needs: frozenset[str]) -> Tensor | None:
    """Ids int64 [B, length] of a call's positions; None where they are not needed or not given.

    tokens_BT: int64; more columns than `length` (incremental decoding): the last ones count.
    """
    if "token_ids" not in needs or tokens_BT is None:
        return None
    return tokens_BT[:, -length:]
