"""Confident multiple choice learning with Megatron: heads for a GPT model, and a loss function for
the forward step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.ensembles.cmcl import (
    HISTOGRAMS,
    EnsembleHeads,
    confidence_histograms,
    sequence_oracle_loss,
)
from moe_plugin.ensembles.settings import EnsembleSettings, flags, given_settings

# arguments of the training script, named and meant as in fairseq
FLAGS = flags("sentence", "token", "sequence")
# what `oracle_loss_function` logs in addition: in training, and where it is asked for
ERRORS, CONFIDENCE = ("oracle error", "top-1 error"), "confidence"


@dataclass(frozen=True)
class Ensemble(EnsembleSettings):
    """What the arguments of an ensemble ask for; see `FLAGS`."""

    def loss_function(self, labels_BS: Tensor, loss_mask_BS: Tensor, *, training: bool,
                      per_token: bool) -> Callable[[Tensor], Any]:
        """See `oracle_loss_function`; in evaluation labels are exact, and confidences are counted.
        Its loss is also logged under Megatron's name.
        """
        loss = oracle_loss_function(labels_BS, loss_mask_BS, self.k, self.beta, per_token=per_token,
                                    labelling=self.labels if training else "exact",
                                    by_sequence=self.by_sequence, confidence=not training)

        def named(logits_BSMV: Tensor) -> Any:
            *found, logged = loss(logits_BSMV)
            return *found, {"lm loss": logged["oracle loss"], **logged}

        return named


def ensemble_of(args: argparse.Namespace) -> Ensemble | None:
    """The ensemble that a training run's arguments ask for; None: one output layer.

    Raises: ValueError: an argument out of bounds, or one that does not fit an ensemble.
    """
    untied = args.untie_embeddings_and_output_weights
    found = given_settings(args, FLAGS, (
        (args.ensemble_hidden or not args.ensemble_sharing, "ensemble_sharing",
         "0 without ensemble_hidden: heads share features of a layer of their own",
         "give --ensemble-hidden"),
        (args.tensor_model_parallel_size == 1, "tensor_model_parallel_size", "1 with ensemble_heads"
         ": the heads are whole", "use 1"),
        (untied, "untie_embeddings_and_output_weights", "True with ensemble_heads, which have "
         "weights of their own", "use --untie-embeddings-and-output-weights"),
        (not args.overlap_moe_expert_parallel_comm, "overlap_moe_expert_parallel_comm",
         "False with ensemble_heads", "leave it out")))
    return found and Ensemble(**vars(found))


class _OutputHeads(nn.Module):
    """Heads behind the interface of Megatron's output layer: [S, B, H] to ([S, B, M, V], None).

    In checkpoints what makes the logits is `weight`, for which Megatron looks.
    """

    _NAMES = ("heads.w_out_MHC", "weight")  # here, in checkpoints

    def __init__(self, heads: EnsembleHeads) -> None:
        super().__init__()
        self.heads = heads
        self.register_state_dict_post_hook(_saved)
        self.register_load_state_dict_pre_hook(_to_load)

    def forward(self, x_SBH: Tensor, weight: Any = None, **_unused: Any) -> tuple[Tensor, None]:
        return self.heads(x_SBH), None


def _saved(layer: _OutputHeads, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    here, there = layer._NAMES
    state[prefix + there] = state.pop(prefix + here)


def _to_load(layer: _OutputHeads, state: dict[str, Any], prefix: str, *_unused: Any) -> None:
    here, there = layer._NAMES
    if prefix + there in state:
        state[prefix + here] = state.pop(prefix + there)


def add_heads(model: nn.Module, heads: int, *, hidden: int = 0, sharing: float = 0.0,
              classes: int | None = None) -> nn.Module:
    """Put an ensemble of heads in place of a GPT model's output layer.

    Without labels it then returns logits [B, S, M, V].

    On stages without an output layer nothing is done. Call it before the data-parallel wrapper.

    classes: of the heads, the tokens that occur: heads that are not responsible are pulled to the
        uniform distribution over them. None: the model's, which Megatron pads.
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
    made = EnsembleHeads(config.hidden_size, classes or model.vocab_size, heads, hidden=hidden,
                         sharing=sharing, dtype=config.params_dtype)
    model.output_layer = _OutputHeads(made).to(next(model.parameters()).device)
    return model


def oracle_loss_function(labels_BS: Tensor, loss_mask_BS: Tensor, k: int = 1, beta: float = 0.75, *,
                         labelling: str = "exact", by_sequence: bool = True,
                         per_token: bool = False,
                         confidence: bool = False) -> Callable[[Tensor], Any]:
    """The loss function that Megatron's `forward_step` returns with the logits [B, S, M, V].

    Args:
        labels_BS, loss_mask_BS: of the micro-batch; mask > 0: the token counts.
        k, beta, labelling: see `confident_oracle_loss`. by_sequence: a sequence's tokens have the
            same responsible heads.
        per_token: `calculate_per_token_loss`: returns the sum and the number of tokens instead of
            the mean.
        confidence: log how sure the heads are, too: `confidence_histograms`, one after another in
            the order of `HISTOGRAMS`, float [H * BINS].
    Returns: a function of the logits that gives what Megatron expects; logged: sums and tokens of
        "oracle loss", "oracle error" (no head is right) and "top-1 error" (the mean of the heads is
        wrong).
    """
    def loss(logits_BSMV: Tensor) -> Any:
        real_BS = loss_mask_BS > 0
        oracle, errors = sequence_oracle_loss(logits_BSMV, labels_BS, real_BS, k, beta,
                                              labels=labelling, by_sequence=by_sequence)
        tokens, total = real_BS.sum(), oracle.loss_N.sum()
        sums = {
            "oracle loss": total.detach(), "oracle error": errors["oracle"].sum(),
            "top-1 error": errors["top1"].sum()
        }
        logged = {
            name: torch.stack([value.float(), tokens.float()]) for name, value in sums.items()
        }
        if confidence:
            sure = confidence_histograms(logits_BSMV.flatten(0, 1), oracle.chosen_NM,
                                         real_BS.flatten())
            logged[CONFIDENCE] = torch.cat([sure[name] for name in HISTOGRAMS]).float()
        return (total, tokens.to(torch.int), logged) if per_token else (total / tokens.clamp(min=1),
                                                                        logged)

    return loss
