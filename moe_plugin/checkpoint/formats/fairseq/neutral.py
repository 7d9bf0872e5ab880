"""Upcycling of fairseq's dense decoder language models: their tensors and settings under neutral
names, and those of the Mixture of Experts as fairseq reads them.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.formats.fairseq.entries import OPTIMIZER, PARAMETERS, STATE
from moe_plugin.checkpoint.formats.fairseq.neutral_names import (
    fairseq_tensors,
    more_tensors,
    neutral_tensors,
    our_prefix,
)
from moe_plugin.checkpoint.formats.fairseq.neutral_settings import (
    from_decoder,
    model_arguments,
    to_decoder,
)
from moe_plugin.checkpoint.neutral import NEUTRAL, DecoderSettings
from moe_plugin.checkpoint.reshard import COLUMNS, GROUPS
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Source, View

logger = logging.getLogger(__name__)


def to_neutral(source: Source) -> Source:
    """A view of a dense `fairseq` source with neutral names and settings, of the model alone."""
    if source.layers:
        raise CheckpointError(f"{next(iter(source.layers))!r} already has experts; give a dense "
                              "model")
    model = to_decoder(source, model_arguments(source.values[STATE]))
    weights = [source.tensor(key) for key in source.entries if key[0] == MODEL]
    if others := sorted({field for field, _ in source.entries} - {MODEL}):
        logger.info("left out: %s, which a model of experts starts without", ", ".join(others))
    values = {name: value for name, value in source.values.items()
              if name not in (COLUMNS, GROUPS, PARAMETERS, "settings")}
    return View(source, neutral_tensors(View(source, weights), model.tied), format=NEUTRAL,
                values={**values, "model": model.to_dict(), "step": source.values["step"] or 0})


def from_neutral(source: Source) -> Source:
    """A view of an upcycled model with the names of our fairseq models."""
    model = DecoderSettings.from_dict(source.values["model"])
    tensors = list(fairseq_tensors(source))
    tensors += more_tensors(tensors, model.tied, model.positions == "sinusoidal")
    return View(source, tensors, format="fairseq",
                layers={our_prefix(prefix): dict(layer) for prefix, layer in source.layers.items()},
                values={"step": source.values["step"], STATE: _state(source)})


def _state(source: Source) -> dict[str, Any]:
    """What a file has besides tensors: the dense model's, with the settings of experts."""
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
