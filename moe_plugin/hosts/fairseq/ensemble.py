"""Confident multiple choice learning in fairseq: `moe_ensemble_lm`, a language model with an
ensemble of output heads, and the criterion `moe_confident_oracle` (see
`moe_plugin.training.ensembles.cmcl`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fairseq import metrics
from torch import Tensor

from moe_plugin.checkpoint.formats.fairseq.translate import plain_value, setting
from moe_plugin.hosts.fairseq.compat.names import CrossEntropyCriterion, Meter
from moe_plugin.hosts.fairseq.criterion import GateLoss
from moe_plugin.hosts.fairseq.models import MoETransformerLanguageModel
from moe_plugin.hosts.fairseq.options import ConfidentOracleConfig
from moe_plugin.training.ensembles.cmcl import (
    HISTOGRAMS,
    EnsembleHeads,
    confidence_histograms,
    sequence_oracle_loss,
)


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
