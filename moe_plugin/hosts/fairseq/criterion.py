"""The criteria `moe_cross_entropy` and `moe_label_smoothed_cross_entropy`, which add the gate loss
to the loss of the model.

    loss = inner + moe_gate_loss_wt * gate * sample_size
    gate = mean (or sum) over MoE layers of the weighted router losses; neg_log: -log(gate)

Later, fairseq divides the gradient by `sample_size`. Because the gate loss is multiplied by
`sample_size` first, it becomes an average over tokens, as in fairseq's `moe` branch.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import metrics
from torch import Tensor

from moe_plugin.checkpoint.formats.fairseq.entries import plain_value
from moe_plugin.hosts.fairseq.compat.names import (
    CrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterion,
    Meter,
    utils,
)
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.fairseq.metrics import METRICS, layer_metrics
from moe_plugin.hosts.fairseq.models import MoETransformerLanguageModel
from moe_plugin.hosts.fairseq.options import ConfidentOracleConfig, GateLossFlags
from moe_plugin.hosts.fairseq.refusals import HEADS, values_of
from moe_plugin.hosts.fairseq.translate import setting
from moe_plugin.layer import layers_in
from moe_plugin.routing.contract import balances_by_itself
from moe_plugin.routing.registry import warn_unbalanced
from moe_plugin.training.cmcl import (
    HISTOGRAMS,
    EnsembleHeads,
    confidence_histograms,
    sequence_oracle_loss,
)

logger = logging.getLogger(__name__)


class GateLoss:
    """Mixin that adds the gate loss to a criterion and logs the metrics of fairseq's `moe` branch.

    Attributes:
        flags: settings of the gate loss.
    """

    flags: Any = GateLossFlags()

    @classmethod
    def build_criterion(cls: Any, cfg: Any, task: Any) -> Any:
        """Build the criterion like fairseq, and store the settings of the gate loss."""
        if cfg.moe_gate_loss_wt < 0:
            raise ValueError(
                f"--moe-gate-loss-wt {cfg.moe_gate_loss_wt} is out of bounds: it must be >= 0. Use "
                "0 for no gate loss")
        criterion = super().build_criterion(cfg, task)  # type: ignore[misc]  # of a criterion
        criterion.flags = cfg
        return criterion

    def forward(self: Any, model: Any, sample: dict[str, Any],
                reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return a tuple of the loss, the sample size, and the statistics to log.

        If the model has no MoE layers, the loss is the loss of the inner criterion.
        """
        for moe in layers_in(model):
            moe.forget()  # fairseq continues after a step that ran out of memory
        inner, sample_size, logged = super().forward(  # type: ignore[misc]
            model, sample, reduce=reduce)
        layers = moe_layers(model)
        if not layers:
            return inner, sample_size, {
                **logged, "inner_loss": inner.data, "moe_loss": inner.data.new_zeros(()),
                "batch_count": 1
            }
        gate = self.gate_loss([layer.gate_loss for layer in layers])
        for layer in layers:
            layer.gate_loss = None
        loss = inner + self.flags.moe_gate_loss_wt * gate * sample_size
        logged.update(loss=loss.data, inner_loss=inner.data, moe_loss=gate.data * sample_size,
                      batch_count=1, **layer_metrics([layer.moe_layer for layer in layers]))
        return loss, sample_size, logged

    def gate_loss(self: Any, losses: list[Tensor]) -> Tensor:
        """Compute the mean or sum of all layers' gate losses, and transform it as configured."""
        total = torch.stack(losses).sum()
        if plain_value(self.flags.moe_gate_loss_combine_method) == "average":
            total = total / len(losses)
        if plain_value(self.flags.moe_gate_loss_transform) != "neg_log":
            return total
        # the sum is 0 if no router contributed a loss (for example with a list of routers): then
        # nothing is added, instead of an infinite loss and gradient
        return -torch.log(torch.where(total == 0, torch.ones_like(total), total))

    @classmethod
    def reduce_metrics(cls: Any, logging_outputs: list[dict[str, Any]]) -> None:
        """Log fairseq's metrics, `inner_loss`, `moe_gate_loss` and the metrics in `METRICS`.

        All of these metrics are averaged over ranks and batches.
        """
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        batches = sum(log.get("batch_count", 0) for log in logging_outputs)
        inner = sum(log.get("inner_loss", 0) for log in logging_outputs)
        metrics.log_scalar("inner_loss", inner / sample_size / math.log(2), sample_size, round=3)
        named = logging_outputs
        if not issubclass(cls, LabelSmoothedCrossEntropyCriterion):
            # logged before fairseq's own value, which would include the gate loss
            metrics.log_derived("ppl",
                                lambda meters: utils.get_perplexity(meters["inner_loss"].avg))
            tokens = sum(log.get("ntokens", 0) for log in logging_outputs)
            if tokens != sample_size:
                metrics.log_scalar("nll_loss", inner / tokens / math.log(2), tokens, round=3)
            # equal counts keep fairseq from logging its own nll_loss
            named = [{**log, "ntokens": log.get("sample_size", 0)} for log in logging_outputs]
        super().reduce_metrics(named)  # type: ignore[misc]
        gate = sum(log.get("moe_loss", 0) for log in logging_outputs)
        metrics.log_scalar("moe_gate_loss", gate / sample_size, sample_size, round=4)
        for key in METRICS:
            if any(key in log for log in logging_outputs) and batches > 0:
                value = sum(log.get(key, 0) for log in logging_outputs)
                metrics.log_scalar(key, value / batches, batches, round=3)


class MoECrossEntropyCriterion(GateLoss, CrossEntropyCriterion):
    """The criterion `moe_cross_entropy`."""


class MoELabelSmoothedCrossEntropyCriterion(GateLoss, LabelSmoothedCrossEntropyCriterion):
    """The criterion `moe_label_smoothed_cross_entropy`."""


def check_balance(model: Any, criterion: Any) -> None:
    """Log a warning if the routers need a balance loss but the criterion does not add one."""
    if all(balances_by_itself(layer.moe_layer.moe.router) for layer in moe_layers(model)):
        return
    if not isinstance(criterion, GateLoss):
        warn_unbalanced(
            f"criterion {type(criterion).__name__} does not add the routers' losses "
            "(--moe-losses)", "most tokens will be routed to few experts; use moe_cross_entropy or "
            "moe_label_smoothed_cross_entropy")
    elif not criterion.flags.moe_gate_loss_wt:
        warn_unbalanced("--moe-gate-loss-wt 0 leaves out the routers' losses (--moe-losses)",
                        "most tokens will be routed to few experts; use 0.01 or more")
    elif criterion.flags.moe_gate_loss_wt == GateLossFlags.moe_gate_loss_wt:
        logger.info("the routers' losses have the weight %s, the default of --moe-gate-loss-wt and "
                    "of fairseq's moe branch; a common value is 0.01",
                    GateLossFlags.moe_gate_loss_wt)


# Confident multiple choice learning in fairseq: the language model `moe_ensemble_lm` with an
# ensemble of output heads, and the criterion `moe_confident_oracle` (see
# `moe_plugin.training.cmcl`).
class MoEEnsembleLanguageModel(MoETransformerLanguageModel):
    """A `moe_transformer_lm` with several output heads. The output has shape [B, T, M, V].

    Each head predicts a probability distribution. The probabilities that the model returns are the
    average over all heads.
    """

    @classmethod
    def build_model(cls, args: Any, task: Any) -> MoEEnsembleLanguageModel:
        """Build the model, and replace the output projection with several heads."""
        model = super().build_model(args, task)
        decoder = model.decoder
        if decoder.adaptive_softmax is not None:
            HEADS.refuse(values_of(args))
        decoder.share_input_output_embed = False  # the heads have separate weights
        decoder.output_projection = EnsembleHeads(decoder.output_embed_dim,
                                                  len(task.target_dictionary),
                                                  setting(args, "ensemble_heads", 5),
                                                  hidden=setting(args, "ensemble_hidden", 0),
                                                  sharing=setting(args, "ensemble_sharing", 0.0))
        return model

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        """Return the mean of the probability distributions of all heads, with shape [B, T, V]."""
        log_p_BTMV = F.log_softmax(net_output[0].float(), dim=-1)
        log_p_BTV = torch.logsumexp(log_p_BTMV, dim=2) - torch.log(
            torch.tensor(float(log_p_BTMV.shape[2])))
        return log_p_BTV if log_probs else log_p_BTV.exp()


class _Counts(Meter):  # type: ignore[misc]
    """A meter that adds up vectors of counts, and is logged in the form `3/0/12`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all counts to zero."""
        self.counts: Tensor | int = 0

    def update(self, counts: Tensor) -> None:
        """Add a vector of counts of length BINS."""
        self.counts = self.counts + counts.cpu()

    @property
    def smoothed_value(self) -> str:  # type: ignore[override]
        """Return the counts as a string for the log."""
        return "" if isinstance(self.counts, int) else "/".join(
            str(round(count)) for count in self.counts.tolist())


class _ConfidentOracle(CrossEntropyCriterion):
    """The confident oracle loss without the gate loss."""

    flags: Any

    def forward(self, model: Any, sample: dict[str, Any],
                reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return a tuple of the summed loss, the sample size, and the statistics to log."""
        logits_BTMV = model(**sample["net_input"])[0]
        flags, target_BT = self.flags, sample["target"]
        if logits_BTMV.dim() != 4:
            raise ValueError(
                f"logits of shape {tuple(logits_BTMV.shape)} belong to a model with one output "
                "head, but moe_confident_oracle needs an ensemble. Use --arch moe_ensemble_lm")
        real_BT = target_BT != self.padding_idx
        oracle, errors = sequence_oracle_loss(
            logits_BTMV, target_BT, real_BT, flags.oracle_k, flags.oracle_beta,
            labels=plain_value(flags.oracle_labels) if model.training else "exact",
            by_sequence=plain_value(flags.oracle_unit) == "sentence")
        size = target_BT.size(0) if self.sentence_avg else sample["ntokens"]
        loss = oracle.loss_N.sum() if reduce else oracle.loss_N
        sure = {} if model.training else confidence_histograms(
            logits_BTMV.flatten(0, 1), oracle.chosen_NM, real_BT.flatten())
        return loss, size, {
            "loss": loss.data, "ntokens": sample["ntokens"], "nsentences": target_BT.size(0),
            "sample_size": size, "oracle_errors": errors["oracle"].sum(),
            "top1_errors": errors["top1"].sum(),
            **{f"confidence_{name}": counts for name, counts in sure.items()},
        }

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log fairseq's metrics and the error rates `oracle_error` and `top1_error`.

        `oracle_error` is the fraction of tokens that no head predicts correctly. `top1_error` is
        the fraction of tokens that the mean of all heads predicts incorrectly. During validation,
        histograms of the heads' confidence are also logged.
        """
        super().reduce_metrics(logging_outputs)
        tokens = sum(log.get("ntokens", 0) for log in logging_outputs)
        for name in ("oracle", "top1"):
            errors = sum(log.get(f"{name}_errors", 0) for log in logging_outputs)
            metrics.log_scalar(f"{name}_error", errors / max(1, tokens), tokens, round=4)
        for key in (f"confidence_{name}" for name in HISTOGRAMS):
            for counts in (log[key] for log in logging_outputs if key in log):
                metrics.log_custom(_Counts, key, counts)


class ConfidentOracleCriterion(GateLoss, _ConfidentOracle):
    """The criterion `moe_confident_oracle`."""

    flags = ConfidentOracleConfig()
