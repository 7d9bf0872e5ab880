"""Image tasks: compute the loss of a model during training, and the counts from which evaluation
metrics are computed.

In tensor shapes, B is the number of images, T is the number of positions that have a class (1 for
classification, all pixels for segmentation), M is the number of members, and C is the number of
classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.training.cmcl import (
    BINS,
    HISTOGRAMS,
    EnsembleSettings,
    confidence_histograms,
    sequence_errors,
    sequence_oracle,
)

_SUMS = "images", "loss", "top1", "oracle", "member", "both", "either"


@dataclass(frozen=True)
class VisionTask:
    """Computes losses and counts from the outputs of a model. The outputs have shape [B, ..., C],
    or [B, ..., M, C] for an ensemble.

    Attributes:
        ensemble: settings of the ensemble, or None if the model has a single output.
        smoothing: amount of label smoothing, that is, the fraction of each label that is
            distributed over all classes. Label smoothing is used only without an ensemble.
        segments: True to classify each pixel as background or foreground (class 1).
    """

    ensemble: EnsembleSettings | None = None
    smoothing: float = 0.0
    segments: bool = False

    def _shaped(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = outputs if self.ensemble else outputs.unsqueeze(-2)
        target_BT = target.reshape(len(target), -1)
        return logits.reshape(*target_BT.shape, *logits.shape[-2:]), target_BT

    def losses(self, outputs: Tensor, target: Tensor, *, training: bool) -> Tensor:
        """Return the loss of each image, averaged over the positions of the image, with shape [B].

        During evaluation, labels are not smoothed.

        Args:
            outputs: outputs of the model.
            target: int64 tensor [B] or [B, ...] that contains the class of each position.
            training: True to compute the training loss.
        """
        logits_BTMC, target_BT = self._shaped(outputs, target)
        if self.ensemble:
            return self._oracle(logits_BTMC, target_BT, training).loss_N.view(target_BT.shape
                                                                             ).mean(1)
        loss_N = F.cross_entropy(
            logits_BTMC.flatten(0, 2), target_BT.flatten(), reduction="none",
            label_smoothing=self.smoothing if training else 0.0)
        return loss_N.view(target_BT.shape).mean(1)

    def _oracle(self, logits_BTMC: Tensor, target_BT: Tensor, training: bool) -> Any:
        assert self.ensemble is not None
        e = self.ensemble
        return sequence_oracle(logits_BTMC, target_BT, torch.ones_like(target_BT, dtype=torch.bool),
                               e.k, e.beta, labels=e.labels if training else "exact",
                               by_sequence=e.by_sequence)

    def counts(self, outputs: Tensor, target: Tensor, real_B: Tensor) -> Tensor:
        """Return the sums for the metrics of `results`, over a batch's real images (float64 [V]).
        """
        logits_BTMC, target_BT = self._shaped(outputs, target)
        errors = sequence_errors(logits_BTMC, target_BT,
                                 self.ensemble is None or self.ensemble.by_sequence)
        p_BTMC = logits_BTMC.float().softmax(-1)
        found_BT, true_BT = p_BTMC.mean(2).argmax(-1) == 1, target_BT == 1
        by_name = {"both": (found_BT & true_BT).double().sum(1),
                   "either": (found_BT | true_BT).double().sum(1),
                   "images": torch.ones_like(real_B, dtype=torch.float64),
                   "loss": self.losses(outputs, target, training=False).double(), **errors}
        sums = torch.stack([(by_name[name] * real_B).sum() for name in _SUMS])
        if not self.ensemble:
            return sums
        sure = confidence_histograms(
            logits_BTMC.flatten(0, 1), self._oracle(logits_BTMC, target_BT, False).chosen_NM,
            real_B.view(-1, 1).expand_as(target_BT).flatten())
        return torch.cat([sums, *(sure[name] for name in HISTOGRAMS)])

    def results(self, sums: Tensor) -> dict[str, Any]:
        """Convert sums to a dict of named metrics. The sums are those returned by `counts`, added
        up over all batches and ranks.

        The dict contains the loss and the accuracy. For segmentation, the accuracy is the fraction
        of correct pixels. For segmentation, the dict also contains the intersection over union of
        the foreground. For an ensemble, the dict also contains error rates and histograms of the
        members' confidence. Each histogram counts predicted distributions by their largest
        probability, in bins of equal width between 0 and 1.
        """
        images, loss, top1, oracle, member, both, either = sums[:len(_SUMS)].tolist()
        values = {"valid_loss": loss / images, "accuracy": 1 - top1 / images}
        if self.segments:
            values["iou"] = both / either if either else 1.0
        if not self.ensemble:
            return values
        counts = sums[len(_SUMS):].view(len(HISTOGRAMS), BINS).round().long().tolist()
        return {**values, "top1_error": top1 / images, "oracle_error": oracle / images,
                "member_error": member / images,
                "confidence": dict(zip(HISTOGRAMS, counts, strict=True))}
