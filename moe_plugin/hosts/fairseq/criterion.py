"""Criteria `moe_cross_entropy` and `moe_label_smoothed_cross_entropy`: the loss plus the gate loss,
once.

    loss = inner + moe_gate_loss_wt * gate * sample_size
    gate = mean (or sum) over MoE layers of that layer's weighted router losses; neg_log: -log(gate)

sample_size makes the gate loss an average over tokens once fairseq divides the gradient by it (as
in fairseq's `moe` branch).
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import metrics
from torch import Tensor

from moe_plugin.checkpoint.formats.fairseq.translate import plain_value, setting
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
from moe_plugin.layer import layers_in
from moe_plugin.routing.contract import balances_by_itself
from moe_plugin.routing.registry import warn_unbalanced
from moe_plugin.training.ensembles.cmcl import (
    HISTOGRAMS,
    EnsembleHeads,
    confidence_histograms,
    sequence_oracle_loss,
)

logger = logging.getLogger(__name__)


class GateLoss:
    """Adds the gate loss to another criterion and logs the branch's metrics.

    Attributes:
        flags: its settings.
    """

    flags: Any = GateLossFlags()

    @classmethod
    def build_criterion(cls: Any, cfg: Any, task: Any) -> Any:
        """As fairseq's."""
        if cfg.moe_gate_loss_wt < 0:
            raise ValueError(
                f"--moe-gate-loss-wt {cfg.moe_gate_loss_wt} is out of bounds: must be >= 0; use 0 "
                "for no gate loss")
        made = super().build_criterion(cfg, task)
        made.flags = cfg
        return made

    def forward(self: Any, model: Any, sample: dict[str, Any],
                reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """(loss, sample size, values to log). A model without MoE layers gives the inner loss."""
        for moe in layers_in(model):
            moe.forget()  # fairseq goes on after a step that ran out of memory
        inner, sample_size, logged = super().forward(model, sample, reduce=reduce)
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
        """The layers' gate losses combined and transformed."""
        total = torch.stack(losses).sum()
        if plain_value(self.flags.moe_gate_loss_combine_method) == "average":
            total = total / len(losses)
        if plain_value(self.flags.moe_gate_loss_transform) != "neg_log":
            return total
        # 0: no router that decided has a loss (a list of routers, say): nothing to add, and no
        # infinite gradient
        return -torch.log(torch.where(total == 0, torch.ones_like(total), total))

    @classmethod
    def reduce_metrics(cls: Any, logging_outputs: list[dict[str, Any]]) -> None:
        """fairseq's metrics, `inner_loss`, `moe_gate_loss` and those of `METRICS`.

        Averaged over ranks and batches.
        """
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        batches = sum(log.get("batch_count", 0) for log in logging_outputs)
        inner = sum(log.get("inner_loss", 0) for log in logging_outputs)
        metrics.log_scalar("inner_loss", inner / sample_size / math.log(2), sample_size, round=3)
        named = logging_outputs
        if not issubclass(cls, LabelSmoothedCrossEntropyCriterion):
            # named before fairseq's own, which would include the gate loss
            metrics.log_derived("ppl",
                                lambda meters: utils.get_perplexity(meters["inner_loss"].avg))
            tokens = sum(log.get("ntokens", 0) for log in logging_outputs)
            if tokens != sample_size:
                metrics.log_scalar("nll_loss", inner / tokens / math.log(2), tokens, round=3)
            # then fairseq names none
            named = [{**log, "ntokens": log.get("sample_size", 0)} for log in logging_outputs]
        super().reduce_metrics(named)
        gate = sum(log.get("moe_loss", 0) for log in logging_outputs)
        metrics.log_scalar("moe_gate_loss", gate / sample_size, sample_size, round=4)
        for key in METRICS:
            if any(key in log for log in logging_outputs) and batches > 0:
                value = sum(log.get(key, 0) for log in logging_outputs)
                metrics.log_scalar(key, value / batches, batches, round=3)


class MoECrossEntropyCriterion(GateLoss, CrossEntropyCriterion):
    """`moe_cross_entropy`."""


class MoELabelSmoothedCrossEntropyCriterion(GateLoss, LabelSmoothedCrossEntropyCriterion):
    """`moe_label_smoothed_cross_entropy`."""


def check_balance(model: Any, criterion: Any) -> None:
    """A warning where the routers need a balance loss and the criterion adds none."""
    if all(balances_by_itself(layer.moe_layer.moe.router) for layer in moe_layers(model)):
        return
    if not isinstance(criterion, GateLoss):
        warn_unbalanced(
            f"criterion {type(criterion).__name__} does not add the routers' losses "
            "(--moe-losses)", "most tokens will visit few experts; use moe_cross_entropy or "
            "moe_label_smoothed_cross_entropy")
    elif not criterion.flags.moe_gate_loss_wt:
        warn_unbalanced("--moe-gate-loss-wt 0 leaves out the routers' losses (--moe-losses)",
                        "most tokens will visit few experts; use 0.01 or more")
    elif criterion.flags.moe_gate_loss_wt == GateLossFlags.moe_gate_loss_wt:
        logger.info("the routers' losses have weight %s, the default of --moe-gate-loss-wt and of "
                    "fairseq's moe branch; 0.01 is usual", GateLossFlags.moe_gate_loss_wt)


# Confident multiple choice learning in fairseq: `moe_ensemble_lm`, a language model with an
# ensemble of output heads, and the criterion `moe_confident_oracle` (see
# `moe_plugin.training.ensembles.cmcl`).
class MoEEnsembleLanguageModel(MoETransformerLanguageModel):
    """`moe_transformer_lm` whose output is [B, T, M, V]: one distribution per head.

    Probabilities are the mean over heads.
    """

    @classmethod
    def build_model(cls, args: Any, task: Any) -> MoEEnsembleLanguageModel:
        """Build the model, then put the heads in place of its output projection."""
        model = super().build_model(args, task)
        decoder = model.decoder
        if decoder.adaptive_softmax is not None:
            raise ValueError(
                f"--adaptive-softmax-cutoff {setting(args, 'adaptive_softmax_cutoff', None)} "
                "cannot be used with an ensemble of heads: "
                "leave it out")
        decoder.share_input_output_embed = False  # the heads have weights of their own
        decoder.output_projection = EnsembleHeads(decoder.output_embed_dim,
                                                  len(task.target_dictionary),
                                                  setting(args, "ensemble_heads", 5),
                                                  hidden=setting(args, "ensemble_hidden", 0),
                                                  sharing=setting(args, "ensemble_sharing", 0.0))
        return model

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        """The mean of the heads' distributions, [B, T, V]."""
        log_p_BTMV = F.log_softmax(net_output[0].float(), dim=-1)
        log_p_BTV = torch.logsumexp(log_p_BTMV, dim=2) - torch.log(
            torch.tensor(float(log_p_BTMV.shape[2])))
        return log_p_BTV if log_probs else log_p_BTV.exp()


class _Counts(Meter):  # type: ignore[misc]
    """Numbers by place, which a log shows as `3/0/12`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing is counted."""
        self.counts: Tensor | int = 0

    def update(self, counts: Tensor) -> None:
        """Add counts, [BINS]."""
        self.counts = self.counts + counts.cpu()

    @property
    def smoothed_value(self) -> str:  # type: ignore[override]
        """For logs."""
        return "" if isinstance(self.counts, int) else "/".join(
            str(round(count)) for count in self.counts.tolist())


class _ConfidentOracle(CrossEntropyCriterion):
    """The loss without the gate loss."""

    flags: Any

    def forward(self, model: Any, sample: dict[str, Any],
                reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """(summed loss, sample size, values to log)."""
        logits_BTMV = model(**sample["net_input"])[0]
        flags, target_BT = self.flags, sample["target"]
        if logits_BTMV.dim() != 4:
            raise ValueError(
                f"logits of shape {tuple(logits_BTMV.shape)} are of one head; moe_confident_oracle "
                "needs an ensemble: "
                "use --arch moe_ensemble_lm")
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
        """fairseq's, and the error rates: no head is right; the mean of the heads is wrong; in
        validation also how sure heads are.
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
    """`moe_confident_oracle`."""

    flags = ConfidentOracleConfig()
