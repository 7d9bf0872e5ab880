"""Registers everything with stock fairseq, at import. See `register`."""

from __future__ import annotations

from fairseq.criterions import register_criterion
from fairseq.models import register_model, register_model_architecture

from moe_plugin.hosts.fairseq.architectures import (
    LANGUAGE_MODELS,
    TRANSLATION_MODELS,
    language_model,
    translation_model,
)
from moe_plugin.hosts.fairseq.compat import install, registries
from moe_plugin.hosts.fairseq.criterion import (
    MoECrossEntropyCriterion,
    MoELabelSmoothedCrossEntropyCriterion,
)
from moe_plugin.hosts.fairseq.ensemble import ConfidentOracleCriterion, MoEEnsembleLanguageModel
from moe_plugin.hosts.fairseq.models import MoETransformerLanguageModel, MoETransformerModel
from moe_plugin.hosts.fairseq.options import (
    ConfidentOracleConfig,
    MoECrossEntropyConfig,
    MoEEnsembleConfig,
    MoELabelSmoothedConfig,
    MoELanguageModelConfig,
)
from moe_plugin.hosts.fairseq.trainer import MoETrainer

LANGUAGE_MODEL, TRANSLATION_MODEL = "moe_transformer_lm", "moe_transformer"

install()
register_model(LANGUAGE_MODEL, dataclass=MoELanguageModelConfig)(MoETransformerLanguageModel)
register_model(TRANSLATION_MODEL)(MoETransformerModel)
for _name, _size in LANGUAGE_MODELS.items():
    register_model_architecture(LANGUAGE_MODEL, _name)(language_model(*_size))
for _name, _size in TRANSLATION_MODELS.items():
    register_model_architecture(TRANSLATION_MODEL, _name)(translation_model(*_size))
register_model("moe_ensemble_lm", dataclass=MoEEnsembleConfig)(MoEEnsembleLanguageModel)
register_criterion("moe_confident_oracle",
                   dataclass=ConfidentOracleConfig)(ConfidentOracleCriterion)
register_criterion("moe_cross_entropy", dataclass=MoECrossEntropyConfig)(MoECrossEntropyCriterion)
register_criterion("moe_label_smoothed_cross_entropy",
                   dataclass=MoELabelSmoothedConfig)(MoELabelSmoothedCrossEntropyCriterion)
registries.stand_for("transformer_lm", MoETransformerLanguageModel, MoELanguageModelConfig)
registries.stand_for("transformer", MoETransformerModel, None)
registries.use_trainer(MoETrainer)
registries.tell_of_validations()
registries.sharding_without_fairscale()
