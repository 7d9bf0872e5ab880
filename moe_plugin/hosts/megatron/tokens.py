"""Token ids and sequences for routers and losses that want them (router hash, loss sequence), and
when an optimizer step is over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.records import TokenInfo


class TakesTokenIds:
    """Base of layers to which `give_token_ids` hands token ids.

    Attributes:
        needs_of_router: what the router wants of a call, see `RouterModule.needs`.
        tokens_BS: int64 [B, S], token ids of the next call.
    """

    needs_of_router: frozenset[str] = frozenset()
    tokens_BS: Tensor | None = None


def give_token_ids(model: nn.Module) -> None:
    """Before each forward pass of a GPT model (chunk) hand its `input_ids` [B, S] to the MoE layers
    in it that need them.

    Call it on what the model provider returns. Every pipeline stage must be called with the tokens,
    not the first alone.
    """
    layers = [m for m in model.modules()
              if isinstance(m, TakesTokenIds) and "token_ids" in m.needs_of_router]

    def hand_over(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens_BS = args[0] if args else kwargs.get("input_ids")
        for layer in layers:
            layer.tokens_BS = tokens_BS

    if layers:
        model.register_forward_pre_hook(hand_over, with_kwargs=True)


def token_info(x_SBD: Tensor, tokens_BS: Tensor | None, needs: frozenset[str],
               rank: int) -> TokenInfo | None:
    """What the router needs to know of a batch in Megatron's order; None where it needs nothing.

    x_SBD: this tensor-parallel rank's run of the sequence, number `rank`; tokens_BS: of the whole
    sequence.
    """
    if not needs:
        return None
    length, batch = x_SBD.shape[:2]
    ids_SB = None
    if "token_ids" in needs:
        if tokens_BS is None:
            raise ValueError(
                "input_ids=None does not fit this router, which needs token ids on every pipeline "
                "stage; call "
                "moe_plugin.hosts.megatron.tokens.give_token_ids(model) in the model provider")
        mine_SB = tokens_BS.t()[rank * length : (rank + 1) * length]
        # past the end: padding, not routed
        ids_SB = torch.cat([mine_SB, mine_SB.new_zeros(length - mine_SB.shape[0], batch)])
    sequence_SB = torch.arange(batch, device=x_SBD.device).expand(
        length, batch) if "sequences" in needs else None
    return TokenInfo(ids_SB, sequence_SB, batch)


class StepClock:
    """Tells when the first micro-batch of a new step begins, by Megatron's own count of
    micro-batches a step.

    Where Megatron's count is not set (training loops other than its own) it never does: these call
    `moe_plugin.routing.finish_step`.
    """

    def __init__(self) -> None:
        self.left: int | None = None

    def new_step(self, microbatches: int | None) -> bool:
        """To be called once a training pass. microbatches: of a step now; None: not known. True: a
        step has ended before this pass.
        """
        if microbatches is None:
            return False
        ended = self.left == 0
        if self.left in (None, 0):
            self.left = microbatches
        self.left -= 1
        return ended

    def ended(self) -> bool:
        """Whether a step has ended that nobody was told of (before a checkpoint is written); it
        counts as told.
        """
        ended, self.left = self.left == 0, None if self.left == 0 else self.left
        return ended
