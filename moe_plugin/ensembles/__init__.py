"""Losses over a model's outputs (losses of routers: `moe_plugin.routing.losses`)."""

from moe_plugin.ensembles.cmcl import (
    BINS,
    HISTOGRAMS,
    EnsembleHeads,
    OracleLoss,
    confidence_counts,
    confidence_histograms,
    confident_oracle_loss,
    ensemble_errors,
    responsible,
    sequence_errors,
    sequence_oracle,
    sequence_oracle_loss,
    share_features,
    uniform_divergence,
)

__all__ = [
    "BINS", "HISTOGRAMS", "EnsembleHeads", "OracleLoss", "confidence_counts",
    "confidence_histograms", "confident_oracle_loss", "ensemble_errors", "responsible",
    "sequence_errors", "sequence_oracle", "sequence_oracle_loss", "share_features",
    "uniform_divergence"
]
