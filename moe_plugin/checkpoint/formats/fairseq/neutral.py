"""Upcycling of fairseq's dense decoder language models.

This module converts the tensors and settings of a dense model to a framework-independent form.
After upcycling, this module converts the Mixture-of-Experts model back to fairseq's names.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.formats.fairseq.entries import (
    ACTIVATIONS,
    OPTIMIZER,
    PARAMETERS,
    STATE,
    plain_value,
)
from moe_plugin.checkpoint.formats.fairseq.neutral_names import (
    PADDING_ROWS,
    POSITIONS,
    fairseq_tensors,
    more_tensors,
    neutral_tensors,
    our_prefix,
)
from moe_plugin.checkpoint.layers import layer_settings
from moe_plugin.checkpoint.neutral import NEUTRAL, DecoderSettings, NeutralModel
from moe_plugin.checkpoint.reshard import COLUMNS, GROUPS
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Source, View
from moe_plugin.config import flatten
from moe_plugin.config.flags import setting_specs
from moe_plugin.utils.messages import short

_EPS = 1e-5  # epsilon of fairseq's layer norms, which is not configurable


def model_arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model settings in a fairseq file, or an empty dict if there are none."""
    model = (state.get("cfg") or {}).get("model", state.get("args"))
    values = vars(model) if isinstance(model, Namespace) else dict(model or {})
    return {name: plain_value(value) for name, value in values.items()}


def to_decoder(source: Source, arguments: Mapping[str, Any]) -> DecoderSettings:
    """Return the framework-independent settings of a `fairseq` source.

    Raises:
        CheckpointError: If settings are missing or have no framework-independent form.
    """
    for name in ("decoder_attention_heads", "activation_fn", "decoder_normalize_before"):
        if name not in arguments:
            raise CheckpointError(f"the checkpoint's settings do not contain {name}, so it is not "
                                  "a checkpoint of a decoder language model (transformer_lm)")
    learned = (MODEL, POSITIONS) in source.entries
    rows = arguments.get("max_target_positions")
    if learned:
        rows = source.entries[MODEL, POSITIONS].shape[0] - PADDING_ROWS
    plain = bool(arguments.get("no_token_positional_embeddings"))
    heads, width = int(arguments["decoder_attention_heads"]), _width(source)
    activation = ACTIVATIONS.get(str(arguments["activation_fn"]))
    if activation is None:
        raise CheckpointError(f"activation_fn={short(arguments['activation_fn'])} cannot be "
                              "converted to another framework; supported activations: "
                              f"{', '.join(ACTIVATIONS)}")
    return DecoderSettings(
        heads=heads, kv_heads=heads, norm="layernorm", norm_eps=_EPS, activation=activation,
        gated=False, positions="learned" if learned else "none" if plain else "sinusoidal",
        tied=bool(arguments.get("share_decoder_input_output_embed")),
        pre_norm=bool(arguments["decoder_normalize_before"]), max_positions=int(rows or 0),
        embed_scale=1.0 if arguments.get("no_scale_embedding") else math.sqrt(width))


def _width(source: Source) -> int:
    key = MODEL, "decoder.embed_tokens.weight"
    if key not in source.entries:
        raise CheckpointError("the checkpoint has no tensor 'decoder.embed_tokens.weight', so it "
                              "is not a checkpoint of a decoder language model (transformer_lm)")
    return source.entries[key].shape[1]


def from_decoder(source: Source, old: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the settings of an upcycled model to fairseq's settings.

    Args:
        source: framework-independent source of the upcycled model.
        old: fairseq's settings of the dense model.
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


logger = logging.getLogger(__name__)


def to_neutral(source: Source) -> Source:
    """Return a view of a dense `fairseq` source's model that uses framework-independent names."""
    if source.layers:
        raise CheckpointError(f"{next(iter(source.layers))!r} already has experts; use a dense "
                              "model")
    model = to_decoder(source, model_arguments(source.values[STATE]))
    weights = [source.tensor(key) for key in source.entries if key[0] == MODEL]
    if others := sorted({field for field, _ in source.entries} - {MODEL}):
        logger.info("left out %s, which is not used in a Mixture of Experts", ", ".join(others))
    values = {name: value for name, value in source.values.items()
              if name not in (COLUMNS, GROUPS, PARAMETERS, "settings")}
    return View(source, neutral_tensors(View(source, weights), model.tied), format=NEUTRAL,
                values={**values, "model": model.to_dict(), "step": source.values["step"] or 0})


def from_neutral(source: Source) -> Source:
    """Return a view of an upcycled model that uses the names of this package's fairseq models."""
    model = DecoderSettings.from_dict(source.values["model"])
    tensors = list(fairseq_tensors(source))
    tensors += more_tensors(tensors, model.tied, model.positions == "sinusoidal")
    return View(source, tensors, format="fairseq",
                layers={our_prefix(prefix): dict(layer) for prefix, layer in source.layers.items()},
                values={"step": source.values["step"], STATE: _state(source)})


def _state(source: Source) -> dict[str, Any]:
    """Return all entries of the checkpoint file that are not tensors. These entries are those of
    the dense model and the settings of the experts.
    """
    state = dict(source.values[STATE])
    state.pop(OPTIMIZER, None)
    arguments = from_decoder(source, model_arguments(state))
    if state.get("args"):
        state["args"] = Namespace(**{**vars(state["args"]), **arguments})
    else:
        state["cfg"] = {**state["cfg"], "model": arguments}
    experts = next(iter(source.layers.values()))["num_experts"]
    state[files.MANIFEST] = {
        "version": files.VERSION, "num_experts": experts, "world_size": 1, "rank": 0,
        "expert_parallel_size": 1, "num_updates": source.values["step"]}
    return state
