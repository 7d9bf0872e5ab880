"""Confident multiple choice learning with Megatron: heads for a GPT model, whose loss with labels
is the confident oracle loss, and a run's feature that counts what the heads have wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import run_config
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.training.ensembles.cmcl import (
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

# arguments of training scripts, named and meant as in fairseq
FLAGS = flags("sentence", "token", "sequence")
_ERRORS = {"oracle": "oracle_error", "top1": "top1_error"}  # of `sequence_oracle_loss`: in logs
_COUNTS = 1 + len(_ERRORS)  # tokens, and those that are wrong


def ensemble_of(args: argparse.Namespace) -> EnsembleSettings | None:
    """The ensemble that a training run's arguments ask for; None: one output layer.

    Raises: ValueError: an argument out of bounds, or one that does not fit an ensemble.
    """
    if not args.ensemble_heads:
        return given_settings(args, FLAGS)
    untied = args.untie_embeddings_and_output_weights
    schedule = run_config(settings_from_flags(vars(args))).pipeline.schedule
    return given_settings(args, FLAGS, (
        (args.ensemble_hidden or not args.ensemble_sharing, "ensemble_sharing",
         "0 without ensemble_hidden: heads share features of a layer of their own",
         "give --ensemble-hidden"),
        (args.tensor_model_parallel_size == 1, "tensor_model_parallel_size", "1 with ensemble_heads"
         ": the heads are whole", "use 1"),
        (args.context_parallel_size == 1, "context_parallel_size", "1 with ensemble_heads: a "
         "sequence's heads are chosen by its whole loss", "use 1"),
        (untied, "untie_embeddings_and_output_weights", "True with ensemble_heads, which have "
         "weights of their own", "use --untie-embeddings-and-output-weights"),
        (not args.overlap_moe_expert_parallel_comm, "overlap_moe_expert_parallel_comm",
         "False with ensemble_heads", "leave it out"),
        (not getattr(args, "mtp_num_layers", None), "mtp_num_layers",
         "left out with ensemble_heads: the heads predict the next token", "leave it out"),
        (schedule != "terapipe", "pipeline_schedule", "1f1b, eager-1f1b or auto with "
         "ensemble_heads: a sequence's heads are chosen by its whole loss, not by slices",
         "use 1f1b")))


class _OutputHeads(nn.Module):
    """Heads behind the interface of Megatron's output layer: [S, B, H] to ([S, B, M, V], None).

    In checkpoints what makes the logits is `weight`, for which Megatron looks.
    """

    _NAMES = ("heads.w_out_MHC", "weight")  # here, in checkpoints

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
    """Put an ensemble of heads in place of a GPT model's output layer.

    Without labels it then returns logits [B, S, M, V]; with them the confident oracle loss of each
    token, float32 [B, S], 0 where the `loss_mask` [B, S] that it is given is 0. In evaluation the
    divergence of heads that are not responsible is exact.

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
    made = EnsembleHeads(config.hidden_size, classes or model.vocab_size, ensemble.heads,
                         hidden=ensemble.hidden, sharing=ensemble.sharing,
                         dtype=config.params_dtype)
    loss = OracleLosses(ensemble)
    model.output_layer = _OutputHeads(made, loss).to(next(model.parameters()).device)
    model.register_forward_pre_hook(loss.take_mask, with_kwargs=True)
    model.compute_language_model_loss = loss
    return model


class OracleLosses:
    """Takes the place of a GPT model's `compute_language_model_loss`.

    Attributes: `counts`: since they were last set to None the tokens, and those that are wrong by
        the names of logs, float64 [3]; after them, of evaluations, how sure the heads are:
        `confidence_histograms`, one after another in the order of `HISTOGRAMS`, [H * BINS].
        `training`: whether the last ones were of a step.
    """

    def __init__(self, ensemble: EnsembleSettings) -> None:
        self.ensemble, self.training = ensemble, True
        self.counts: Tensor | None = None
        self._mask_BS: Tensor | None = None

    def take_mask(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A hook before the model's forward pass."""
        self._mask_BS, self.training = kwargs.get("loss_mask"), model.training

    def __call__(self, labels_BS: Tensor, logits_SBMV: Tensor) -> Tensor:
        asked, logits_BSMV = self.ensemble, logits_SBMV.transpose(0, 1)
        real_BS = (torch.ones_like(labels_BS, dtype=torch.bool) if self._mask_BS is None
                   else self._mask_BS.view_as(labels_BS) > 0)
        oracle, wrong = sequence_oracle_loss(
            logits_BSMV, labels_BS, real_BS, asked.k, asked.beta, by_sequence=asked.by_sequence,
            labels=asked.labels if self.training else "exact")
        found = [torch.stack([real_BS.sum(), *(wrong[name].sum() for name in _ERRORS)]).double()]
        if not self.training:
            sure = confidence_histograms(logits_BSMV.flatten(0, 1), oracle.chosen_NM,
                                         real_BS.flatten())
            found += [sure[name] for name in HISTOGRAMS]
        here = torch.cat(found)
        self.counts = here if self.counts is None else self.counts + here
        return oracle.loss_N.view_as(labels_BS)


class EnsembleErrors(RunFeature):
    """Tells what the heads of a run's model have wrong. After the features that skip a step or
    begin it again.

    chunks: of the model; on stages without an output layer no heads are in them.

    Attributes: `has_heads`: whether there are some in them.
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
        """Shares of tokens since the last call; collective."""
        counts = _of_all(self._steps)
        self._steps.zero_()
        return _rates(counts)

    def evaluated(self) -> dict[str, Any]:
        """The same of the last evaluation, and how sure the heads were."""
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
