"""A dense decoder language model's settings in fairseq's names as neutral ones, and those of its
Mixture of Experts in fairseq's.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from moe_plugin.checkpoint.formats.fairseq.neutral_names import PADDING_ROWS, POSITIONS
from moe_plugin.checkpoint.formats.fairseq.translate import ACTIVATIONS, plain_value
from moe_plugin.checkpoint.layers import layer_settings
from moe_plugin.checkpoint.neutral import DecoderSettings, NeutralModel
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Source
from moe_plugin.config import flatten
from moe_plugin.config.flags import setting_specs
from moe_plugin.utils.messages import short

_EPS = 1e-5  # of fairseq's layer norms, which have no setting for it


def model_arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """The model's settings in a file of fairseq; {} where it has none."""
    model = (state.get("cfg") or {}).get("model", state.get("args"))
    values = vars(model) if isinstance(model, Namespace) else dict(model or {})
    return {name: plain_value(value) for name, value in values.items()}


def to_decoder(source: Source, arguments: Mapping[str, Any]) -> DecoderSettings:
    """Neutral settings of a `fairseq` source.

    Raises:
        CheckpointError: they are missing, or have no neutral form.
    """
    for name in ("decoder_attention_heads", "activation_fn", "decoder_normalize_before"):
        if name not in arguments:
            raise CheckpointError(f"the checkpoint's settings do not say {name}: it is of no "
                                  "decoder language model (transformer_lm)")
    learned = (MODEL, POSITIONS) in source.entries
    rows = arguments.get("max_target_positions")
    if learned:
        rows = source.entries[MODEL, POSITIONS].shape[0] - PADDING_ROWS
    plain = bool(arguments.get("no_token_positional_embeddings"))
    heads, width = int(arguments["decoder_attention_heads"]), _width(source)
    activation = ACTIVATIONS.get(str(arguments["activation_fn"]))
    if activation is None:
        raise CheckpointError(f"activation_fn={short(arguments['activation_fn'])} has no neutral "
                              f"form: must be one of {', '.join(ACTIVATIONS)}")
    return DecoderSettings(
        heads=heads, kv_heads=heads, norm="layernorm", norm_eps=_EPS, activation=activation,
        gated=False, positions="learned" if learned else "none" if plain else "sinusoidal",
        tied=bool(arguments.get("share_decoder_input_output_embed")),
        pre_norm=bool(arguments["decoder_normalize_before"]), max_positions=int(rows or 0),
        embed_scale=1.0 if arguments.get("no_scale_embedding") else math.sqrt(width))


def _width(source: Source) -> int:
    key = MODEL, "decoder.embed_tokens.weight"
    if key not in source.entries:
        raise CheckpointError("the checkpoint has no 'decoder.embed_tokens.weight': it is of no "
                              "decoder language model (transformer_lm)")
    return source.entries[key].shape[1]


def from_decoder(source: Source, old: Mapping[str, Any]) -> dict[str, Any]:
    """fairseq's settings of an upcycled model.

    old: those of the dense one.
    """
    paths = {spec.path: spec.dest for spec in setting_specs()}
    model = NeutralModel(source)
    tree = layer_settings(source, next(iter(source.layers)))
    ours = flatten({name: value for name, value in tree.items()
                    if name not in ("model_dim", "num_experts", "losses")})
    return {**old, "_name": "moe_transformer_lm", "moe_dispatch": "ragged",
            "moe_capacity_factor": "none",
            **{paths[path]: str(value) for path, value in ours.items() if path in paths},
            "moe_freq": model.moe[0] + 1, "moe_expert_count": model.experts,
            "moe_top1_expert": False}
