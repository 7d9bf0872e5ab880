"""Register models, criteria and the trainer in standard fairseq on import (see `register`).

Named architectures set the sizes that the user did not pass, in the same way as fairseq's own
architectures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.models import register_model, register_model_architecture

from moe_plugin.hosts.fairseq.compat import install, patching
from moe_plugin.hosts.fairseq.compat.names import base_architecture, base_gpt3_architecture
from moe_plugin.hosts.fairseq.criterion import (
    ConfidentOracleCriterion,
    MoECrossEntropyCriterion,
    MoEEnsembleLanguageModel,
    MoELabelSmoothedCrossEntropyCriterion,
)
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
# name: (width, layers, heads). The inner width is four times the width. Positions are learned and
# embeddings shared (GPT-like)
LANGUAGE_MODELS = {
    "moe_lm_tiny": (64, 2, 2),
    "moe_lm_mini": (256, 4, 4),
    "moe_lm_small": (768, 12, 12),
    "moe_lm_medium": (1024, 24, 16),
    "moe_lm_large": (1536, 24, 16),
    "moe_lm_xl": (2048, 24, 32),
}
TRANSLATION_MODELS = {
    "moe_transformer_tiny": (64, 2, 2),
    "moe_transformer_base": (512, 6, 8),
    "moe_transformer_big": (1024, 6, 16),
}


def set_missing(args: Any, values: dict[str, Any]) -> None:
    """Set the arguments that the user did not pass.

    args: a Namespace while fairseq parses the command line, and a DictConfig while fairseq builds
        the model. The attributes of a DictConfig must not be set through `vars(args)`, because such
        attributes would hide the values that the user passed.
    """
    for name, value in values.items():
        if name not in args:
            setattr(args, name, value)


def _experts(args: Any) -> dict[str, int]:
    """Return the default number of experts, or {} if a flag or a file sets the number."""
    said = any(getattr(args, name, None) for name in ("moe_config", "moe_num_experts"))
    return {} if said else {"moe_expert_count": 8}


def language_model(width: int, layers: int, heads: int) -> Callable[[Any], None]:
    """Return an architecture for a decoder-only language model like GPT. By default, every second
    layer has 8 experts.
    """

    def architecture(args: Any) -> None:
        set_missing(args, {
            "decoder_embed_dim": width, "decoder_layers": layers, "decoder_attention_heads": heads,
            "moe_freq": 2, **_experts(args)
        })
        base_gpt3_architecture(args)

    return architecture


def translation_model(width: int, layers: int, heads: int) -> Callable[[Any], None]:
    """Return an architecture for an encoder-decoder model with pre-norm layers.

    By default, every second layer has 8 experts.
    """

    def architecture(args: Any) -> None:
        for stack in ("encoder", "decoder"):
            set_missing(args, {
                f"{stack}_embed_dim": width, f"{stack}_ffn_embed_dim": 4 * width,
                f"{stack}_layers": layers, f"{stack}_attention_heads": heads,
                f"{stack}_normalize_before": True
            })
        if not any(name in args for name in ("moe_freq", "encoder_moe_freq", "decoder_moe_freq")):
            args.moe_freq = 2
        set_missing(args, _experts(args))
        base_architecture(args)

    return architecture


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
patching.stand_for("transformer_lm", MoETransformerLanguageModel, MoELanguageModelConfig)
patching.stand_for("transformer", MoETransformerModel, None)
patching.use_trainer(MoETrainer)
patching.tell_of_validations()
patching.sharding_without_fairscale()
