# ruff: noqa: UP045, RUF009  (fairseq reads typing.Optional; field() through a helper is a plain
# default)
"""fairseq dataclasses with the flags of this package: the flags of fairseq's `moe` branch, and the
generated flags.

The flags of fairseq's `moe` branch keep their names. This module cannot use
`from __future__ import annotations`, because fairseq creates argparse arguments from the types.
"""

from dataclasses import dataclass, field, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from moe_plugin.config.flags import FlagSpec, flag_specs
from moe_plugin.hosts.fairseq.compat.names import (
    CrossEntropyCriterionConfig,
    LabelSmoothedCrossEntropyCriterionConfig,
    TransformerLanguageModelConfig,
)
from moe_plugin.hosts.fairseq.compat.patching import flag_metadata


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _generated_field(spec: FlagSpec) -> tuple[str, Any, Any]:
    return spec.dest, Optional[str], field(default=None, metadata=flag_metadata(spec))


GeneratedFlags: Any = make_dataclass(
    "GeneratedFlags", [_generated_field(spec) for spec in flag_specs()],
    bases=(FairseqDataclass,))
GeneratedFlags.__doc__ = ("One field for each flag of `moe_plugin.config.flags`. Values are text, "
                          "as on a command line, and None if the flag was not passed.")


@dataclass
class BranchFlags(FairseqDataclass):
    """Flags of fairseq's `moe` branch that every MoE model accepts."""

    moe_expert_count: int = _option(0, "number of experts in each MoE layer (fairseq moe)")
    moe_gating_use_fp32: bool = _option(
        False, "route in fp32 (fairseq moe); this package always does")
    moe_second_expert_policy: ChoiceEnum(["sampling", "all", "random"]) = _option(  # type: ignore[valid-type]
        "sampling", "for top-2 in training: how the second expert is chosen (fairseq moe)")
    moe_normalize_gate_prob_before_dropping: bool = _option(
        False, "normalize gate weights before tokens are dropped, not after (fairseq moe)")
    moe_expert_ffn_dim: Optional[int] = _option(
        None, "accepted but not used, as in fairseq moe; see --moe-expert-hidden-dim")
    moe_top1_expert: bool = _option(False, "one expert per token instead of two (fairseq moe)")
    moe_eval_capacity_token_fraction: float = _option(
        0.25,
        "slots of an expert in evaluation, as a fraction of the batch's tokens; <= 0: as in "
        "training (fairseq moe)")
    moe_normalize_expert_grad: ChoiceEnum(["world_size", "sqrt_world_size"]) = _option(  # type: ignore[valid-type]
        "world_size",
        "divide expert gradients by the world size, or by its square root (fairseq moe)")
    use_moe_pad_mask: bool = _option(False, "do not route padding tokens (fairseq moe)")
    moe_batch_prioritized_routing: bool = _option(
        False, "drop the least confident tokens first (fairseq moe)")
    record_a2a_perf_stats: bool = _option(False, "log the time spent in all-to-all (fairseq moe)")
    dummy_a2a: bool = _option(False,
                              "for profiling: skip the exchange; results are wrong (fairseq moe)")
    moe_expert_parallel_size: int = _option(
        0,
        "number of ranks that share one copy of the experts; 0: all data-parallel ranks. Smaller "
        "groups store replicas")
    moe_lighthouse: Optional[str] = _option(
        None,
        "http://HOST:PORT of a torchft lighthouse: this run is one of several replicas that may "
        "join and leave (docs/replicas.md); without it this run is the only one")
    moe_replica: int = _option(0, "number of this run among the replicas of --moe-lighthouse")


@dataclass
class DecoderFlags(FairseqDataclass):
    """Flags of the decoder-only language model."""

    moe_freq: int = _option(0, "every moe_freq-th layer is an MoE layer; 0: none (fairseq moe)")
    alternate_decoder_ffn_embed_dim: int = _option(
        0, "> 0: the MoE layers become dense layers of this inner width (fairseq moe)")


@dataclass
class EncoderDecoderFlags(FairseqDataclass):
    """Flags of the encoder-decoder model."""

    moe_freq: int = _option(
        0, "every moe_freq-th encoder and decoder layer is an MoE layer; 0: none (fairseq moe)")
    encoder_moe_freq: int = _option(0, "like --moe-freq, for the encoder only (fairseq moe)")
    decoder_moe_freq: int = _option(0, "like --moe-freq, for the decoder only (fairseq moe)")


@dataclass
class MoELanguageModelConfig(DecoderFlags, BranchFlags, GeneratedFlags,
                             TransformerLanguageModelConfig):
    """Settings of `transformer_lm` with MoE layers."""


@dataclass
class MoETransformerFlags(EncoderDecoderFlags, BranchFlags, GeneratedFlags):
    """Settings that the MoE translation model has in addition to those of `transformer`."""


@dataclass
class GateLossFlags(FairseqDataclass):
    """Flags of the MoE criteria."""

    moe_gate_loss_wt: float = _option(1.0, "weight of the gate loss (fairseq moe)")
    moe_gate_loss_combine_method: ChoiceEnum(["average", "sum"]) = _option(  # type: ignore[valid-type]
        "average", "combine the gate losses of the MoE layers by their mean or sum (fairseq moe)")
    moe_gate_loss_transform: ChoiceEnum(["none", "neg_log"]) = _option(  # type: ignore[valid-type]
        "none", "transformation of the combined gate loss (fairseq moe)")


@dataclass
class MoECrossEntropyConfig(GateLossFlags, CrossEntropyCriterionConfig):
    """Settings of the criterion that adds the gate loss to the cross entropy."""


@dataclass
class MoELabelSmoothedConfig(GateLossFlags, LabelSmoothedCrossEntropyCriterionConfig):
    """Settings of the criterion that adds the gate loss to the label-smoothed cross entropy."""


@dataclass
class MoEEnsembleConfig(MoELanguageModelConfig):
    """Settings of a language model with several output heads."""

    ensemble_heads: int = _option(5, "number of output heads")
    ensemble_hidden: int = _option(0, "width of the separate hidden layer of each head; 0: none")
    ensemble_sharing: float = _option(
        0.0,
        "probability that a feature of one head's layer is added to another's; 0: none, CMCL: 0.7")


@dataclass
class ConfidentOracleConfig(GateLossFlags, CrossEntropyCriterionConfig):
    """Settings of the criterion that adds the gate loss to the confident oracle loss."""

    oracle_k: int = _option(1, "number of heads responsible for a sentence or token")
    oracle_beta: float = _option(
        0.75, "weight of the loss that pulls the other heads to the uniform distribution")
    oracle_labels: ChoiceEnum(["exact", "stochastic"]) = _option(  # type: ignore[valid-type]
        "exact", "how that loss is computed: its exact gradient, or cross entropy to random labels")
    oracle_unit: ChoiceEnum(["sentence", "token"]) = _option(  # type: ignore[valid-type]
        "sentence", "whether heads are responsible for whole sentences or for single tokens")


# all dataclasses with flags that the user directory adds to fairseq
KINDS = (MoELanguageModelConfig, MoETransformerFlags, MoEEnsembleConfig, MoELabelSmoothedConfig,
         ConfidentOracleConfig)
