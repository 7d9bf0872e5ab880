"""Confident multiple choice learning for Megatron models.

The module provides prediction heads for a GPT model, and a run feature that counts the wrong
predictions of the heads. The heads are trained with the confident oracle loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import run_config
from moe_plugin.hosts.megatron.refusals import HEADS
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.training.cmcl import (
    BINS,
    HISTOGRAMS,
    EnsembleHeads,
    EnsembleSettings,
    confidence_histograms,
    flags,
    given_settings,
    sequence_oracle_loss,
)
from moe_plugin.utils.run_feature import RunFeature, StepGradients

# arguments of training scripts, with the same names and meanings as in fairseq
FLAGS = flags("sentence", "token", "sequence")
# names in `sequence_oracle_loss`, and names in logs
_ERRORS = {"oracle": "oracle_error", "top1": "top1_error"}
_COUNTS = 1 + len(_ERRORS)  # the number of tokens, and the number of wrong tokens by kind of error


def ensemble_of(args: argparse.Namespace) -> EnsembleSettings | None:
    """Return the ensemble settings that the arguments of a training run contain, or None if no
    ensemble is requested.

    Raises:
        ValueError: If an argument is out of bounds, or cannot be used together with an ensemble.
    """
    if not args.ensemble_heads:
        return given_settings(args, FLAGS)
    untied = args.untie_embeddings_and_output_weights
    schedule = run_config(settings_from_flags(vars(args))).pipeline.schedule
    return given_settings(args, FLAGS, (
        (args.ensemble_hidden or not args.ensemble_sharing, "ensemble_sharing",
         "0 without ensemble_hidden, because heads share the features of this hidden layer",
         "use --ensemble-hidden"),
        (args.tensor_model_parallel_size == 1, "tensor_model_parallel_size", "1 with ensemble_heads"
         ", because heads cannot be split over ranks", "use 1"),
        (args.context_parallel_size == 1, "context_parallel_size", "1 with ensemble_heads, because "
         "the heads of a sequence are chosen by the loss of the whole sequence", "use 1"),
        (untied, "untie_embeddings_and_output_weights", "True with ensemble_heads, which have "
         "separate weights", "use --untie-embeddings-and-output-weights"),
        (not args.overlap_moe_expert_parallel_comm, "overlap_moe_expert_parallel_comm",
         "False with ensemble_heads", "leave it out"),
        (not getattr(args, "mtp_num_layers", None), "mtp_num_layers",
         "left out with ensemble_heads, because the heads predict only the next token",
         "leave it out"),
        (schedule != "terapipe", "pipeline_schedule", "1f1b, eager-1f1b or auto with "
         "ensemble_heads, because the heads of a sequence are chosen by the loss of the whole "
         "sequence, not by slices", "use 1f1b")))


class _OutputHeads(nn.Module):
    """Prediction heads with the interface of Megatron's output layer. The heads map [S, B, H] to
    ([S, B, M, V], None).

    In checkpoints, the parameter that computes the logits is called `weight`, because Megatron
    requires a parameter with this name.
    """

    _NAMES = ("heads.w_out_MHC", "weight")  # name in this module, name in checkpoints

    def __init__(self, heads: EnsembleHeads, loss: OracleLosses) -> None:
        super().__init__()
        self.heads, self.loss = heads, loss
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


def add_heads(model: nn.Module, ensemble: EnsembleSettings, classes: int | None = None
              ) -> nn.Module:
    """Replace the output layer of a GPT model with an ensemble of prediction heads.

    After the replacement, calling the model without labels returns logits [B, S, M, V]. Calling the
    model with labels returns the confident oracle loss of each token, as a float32 tensor [B, S].
    The loss of a token is 0 if `loss_mask` [B, S] is 0 for this token. During evaluation, the
    divergence from the uniform distribution is exact for heads that are not responsible for a
    token.

    Pipeline stages that have no output layer are not changed. Call this function before the model
    is wrapped for data parallelism.

    classes: number of token ids that occur in the data. The loss pulls the predictions of heads
        that are not responsible for a token towards the uniform distribution over these token ids.
        `classes` defaults to the vocabulary size of the model, which Megatron pads.
    Raises:
        ValueError: If the model uses tensor parallelism, which would split the output layer among
            ranks, or if the output layer shares its weights with the embeddings.
    """
    language_model: Any = model
    config = language_model.config
    HEADS.refuse({"tensor_model_parallel_size": config.tensor_model_parallel_size})
    if "output_layer" not in dict(model.named_children()):
        return model
    HEADS.refuse({"shared_embeddings": model.share_embeddings_and_output_weights})
    made = EnsembleHeads(config.hidden_size, classes or language_model.vocab_size, ensemble.heads,
                         hidden=ensemble.hidden, sharing=ensemble.sharing,
                         dtype=config.params_dtype)
    loss = OracleLosses(ensemble)
    model.output_layer = _OutputHeads(made, loss).to(next(model.parameters()).device)
    model.register_forward_pre_hook(loss.take_mask, with_kwargs=True)
    language_model.compute_language_model_loss = loss
    return model


class OracleLosses:
    """Replacement for the method `compute_language_model_loss` of a GPT model.

    Attributes:
        counts: float64 tensor [3]. The first element is the number of tokens. The other two
            elements are the numbers of wrongly predicted tokens, in the order in which they are
            logged. The counts are summed over calls until `counts` is set to None. During
            evaluation, the confidence histograms are appended to the counts in the order of
            `HISTOGRAMS`. Each histogram has BINS elements.
        training: True if the counts come from a training step, False if they come from evaluation.
    """

    def __init__(self, ensemble: EnsembleSettings) -> None:
        self.ensemble, self.training = ensemble, True
        self.counts: Tensor | None = None
        self._mask_BS: Tensor | None = None

    def take_mask(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Store the loss mask of the current micro-batch. The loss uses this mask. This method is a
        hook that runs before the forward pass of the model.
        """
        self._mask_BS, self.training = kwargs.get("loss_mask"), model.training

    def __call__(self, labels_BS: Tensor, logits_SBMV: Tensor) -> Tensor:
        asked, logits_BSMV = self.ensemble, logits_SBMV.transpose(0, 1)
        real_BS = (torch.ones_like(labels_BS, dtype=torch.bool) if self._mask_BS is None
                   else self._mask_BS.view_as(labels_BS) > 0)
        oracle, wrong = sequence_oracle_loss(
            logits_BSMV, labels_BS, real_BS, asked.k, asked.beta, by_sequence=asked.by_sequence,
            labels=asked.labels if self.training else "exact")
        sums = [torch.stack([real_BS.sum(), *(wrong[name].sum() for name in _ERRORS)]).double()]
        if not self.training:
            sure = confidence_histograms(logits_BSMV.flatten(0, 1), oracle.chosen_NM,
                                         real_BS.flatten())
            sums += [sure[name] for name in HISTOGRAMS]
        here = torch.cat(sums)
        self.counts = here if self.counts is None else self.counts + here
        return oracle.loss_N.view_as(labels_BS)


class EnsembleErrors(RunFeature):
    """A run feature that counts how often the ensemble heads of a model make wrong predictions.

    In the list of run features, place this feature after the features that skip or repeat a step.

    chunks: model chunks of the current pipeline stage. The model chunks of stages without an output
        layer contain no heads.

    Attributes:
        has_heads: True if the model chunks contain heads.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._losses = [m.loss for chunk in chunks for m in chunk.modules()
                        if isinstance(m, _OutputHeads)]
        self.has_heads = bool(self._losses)
        self._steps = torch.zeros(_COUNTS, dtype=torch.float64)
        self._evaluation = torch.zeros(_COUNTS + len(HISTOGRAMS) * BINS, dtype=torch.float64)

    def before_passes(self) -> Callable[[], None]:
        self._forget()
        return self._forget

    def _forget(self) -> None:
        for loss in self._losses:
            loss.counts = None

    def after_passes(self) -> None:
        for loss in self._losses:
            if loss.counts is not None and not loss.training:
                self._evaluation += loss.counts.cpu()
                loss.counts = None

    def after_backward(self, gradients: StepGradients) -> None:
        for loss in self._losses:
            if loss.counts is not None:
                self._steps += loss.counts.cpu()

    def numbers(self) -> dict[str, float]:
        """Return the error rates over all tokens that were processed since the last call. This is a
        collective operation, so all ranks must call this method.
        """
        counts = _of_all(self._steps)
        self._steps.zero_()
        return _rates(counts)

    def evaluated(self) -> dict[str, Any]:
        """Return the error rates and the confidence histograms of the latest evaluation."""
        counts = _of_all(self._evaluation)
        self._evaluation.zero_()
        sure = counts[_COUNTS:].view(len(HISTOGRAMS), BINS).long().tolist()
        return {**_rates(counts), "confidence": dict(zip(HISTOGRAMS, sure, strict=True))}


def _of_all(counts: Tensor) -> Tensor:
    comm = comm_of()
    return comm.all_reduce(counts.to(comm.device)).cpu()


def _rates(counts: Tensor) -> dict[str, float]:
    tokens, *wrong = counts[:_COUNTS].tolist()
    return {name: count / max(1.0, tokens)
            for name, count in zip(_ERRORS.values(), wrong, strict=True)}
