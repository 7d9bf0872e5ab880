"""Token ids of Megatron's batches, see `moe_plugin.routing.token_ids`; and when an optimizer step
ends.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_plugin.routing.token_ids import hand_token_ids


def give_token_ids(model: nn.Module) -> None:
    """Hand a GPT model's `input_ids` [B, S] to the MoE layers in it that need them.

    Before each forward pass of the model (chunk).

    Call it on what the model provider returns. Every pipeline stage must be called with the tokens,
    not the first alone.
    """
    hand_token_ids(model, "input_ids")


def ids_of(x_SBD: Tensor, tokens_BS: Tensor | None, needs: frozenset[str], rank: int,
           sequence_parallel: bool = False) -> Tensor | None:
    """Ids int64 [s, B] of this tensor-parallel rank's part; None where they are not needed.

    Args:
        x_SBD: [s, B, D], part number `rank` of the sequence.
        tokens_BS: int64 [B, S], ids of the whole sequence; of packed ones [1, B * S], which
            Megatron may give an MoE layer sample by sample.
        needs: of the router.
        sequence_parallel: packed ones were cut among the ranks before that.
    Raises:
        ValueError: ids are needed and not given.
    """
    if "token_ids" not in needs:
        return None
    if tokens_BS is None:
        raise ValueError(
            "input_ids=None does not fit this router, which needs token ids on every pipeline "
            "stage; call moe_plugin.hosts.megatron.tokens.give_token_ids(model) in the model "
            "provider")
    length, batch = x_SBD.shape[:2]
    if batch > tokens_BS.shape[0]:
        if sequence_parallel:
            tokens_BS, rank = tokens_BS[:, rank * length * batch :][:, : length * batch], 0
        tokens_BS = tokens_BS.view(batch, -1)
    mine_SB = tokens_BS.t()[rank * length : (rank + 1) * length]
    # past the end: padding, not routed
    return torch.cat([mine_SB, mine_SB.new_zeros(length - mine_SB.shape[0], batch)])


class StepClock:
    """Tells when the first micro-batch of a new step begins.

    By Megatron's own count of micro-batches per step.

    Where Megatron's count is not set (training loops other than its own) it never does: these call
    `moe_plugin.routing.finish_step`.
    """

    def __init__(self) -> None:
        self.left: int | None = None

    def new_step(self, microbatches: int | None) -> bool:
        """Call it once per training pass; True: a step has ended before this pass.

        microbatches: per step; None: not known.
        """
        if microbatches is None:
            return False
        ended = self.left == 0
        if self.left in (None, 0):
            self.left = microbatches
        self.left -= 1
        return ended

    def ended(self) -> bool:
        """Whether a step has ended that `new_step` has not reported; it counts as reported.

        Asked before a checkpoint is written.
        """
        ended, self.left = self.left == 0, None if self.left == 0 else self.left
        return ended
