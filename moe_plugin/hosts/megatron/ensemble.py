"""Confident multiple choice learning with Megatron: heads for a GPT model, and a loss function for
the forward step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.ensembles import EnsembleHeads, sequence_oracle_loss


class _OutputHeads(nn.Module):
    """Heads behind the interface of Megatron's output layer: [S, B, H] to ([S, B, M, V], None)."""

    def __init__(self, heads: EnsembleHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x_SBH: Tensor, weight: Any = None, **_unused: Any) -> tuple[Tensor, None]:
        return self.heads(x_SBH), None


def add_heads(model: nn.Module, heads: int, *, hidden: int = 0, sharing: float = 0.0) -> nn.Module:
    """Put an ensemble of heads in place of a GPT model's output layer.

    Without labels it then returns logits [B, S, M, V].

    On stages without an output layer nothing is done. Call it before the data-parallel wrapper.

    Raises:
        ValueError: tensor parallelism, where the output layer is cut over ranks.
    """
    config = model.config
    if config.tensor_model_parallel_size > 1:
        raise ValueError(
            f"tensor_model_parallel_size={config.tensor_model_parallel_size} cannot be used with "
            "ensemble heads: must be 1; "
            "the heads are whole")
    if "output_layer" not in dict(model.named_children()):
        return model
    if model.share_embeddings_and_output_weights:
        raise ValueError(
            "share_embeddings_and_output_weights=True cannot be used with ensemble heads, which "
            "have weights of their own; "
            "set it to False")
    made = EnsembleHeads(config.hidden_size, model.vocab_size, heads, hidden=hidden,
                         sharing=sharing, dtype=config.params_dtype)
    model.output_layer = _OutputHeads(made).to(next(model.parameters()).device)
    return model


def oracle_loss_function(labels_BS: Tensor, loss_mask_BS: Tensor, k: int = 1, beta: float = 0.75, *,
                         labelling: str = "exact", by_sequence: bool = True,
                         per_token: bool = False) -> Callable[[Tensor], Any]:
    """The loss function that Megatron's `forward_step` returns with the logits [B, S, M, V].

    Args:
        labels_BS, loss_mask_BS: of the micro-batch; mask > 0: the token counts.
        k, beta, labelling: see `confident_oracle_loss`. by_sequence: a sequence's tokens have the
            same responsible heads.
        per_token: `calculate_per_token_loss`: returns the sum and the number of tokens instead of
            the mean.
    Returns: a function of the logits that gives what Megatron expects; logged: sums and tokens of
        "oracle loss", "oracle error" (no head is right) and "top-1 error" (the mean of the heads is
        wrong).
    """
    def loss(logits_BSMV: Tensor) -> Any:
        real_BS = loss_mask_BS > 0
        loss_N, errors = sequence_oracle_loss(logits_BSMV, labels_BS, real_BS, k, beta,
                                              labels=labelling, by_sequence=by_sequence)
        tokens, total = real_BS.sum(), loss_N.sum()
        sums = {
            "oracle loss": total.detach(), "oracle error": errors["oracle"].sum(),
            "top-1 error": errors["top1"].sum()
        }
        logged = {
            name: torch.stack([value.float(), tokens.float()]) for name, value in sums.items()
        }
        return (total, tokens.to(torch.int), logged) if per_token else (total / tokens.clamp(min=1),
                                                                        logged)

    return loss
