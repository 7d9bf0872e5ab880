"""Checkpoints of fairseq's decoder language models under neutral names, and back.

See `neutral_names` for tensors and `neutral_settings` for settings. A file of fairseq that is made
of another format's has settings that `fairseq-eval-lm` and `--restore-file` read, and empty
histories.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.formats.fairseq.entries import OPTIMIZER, PARAMETERS, STATE
from moe_plugin.checkpoint.formats.fairseq.neutral_names import (
    fairseq_tensors,
    more_tensors,
    neutral_prefix,
    neutral_tensors,
    our_prefix,
    parameter_order,
)
from moe_plugin.checkpoint.formats.fairseq.neutral_settings import (
    from_decoder,
    model_arguments,
    to_decoder,
)
from moe_plugin.checkpoint.layers import layer_settings
from moe_plugin.checkpoint.neutral import NEUTRAL, OPTIMIZER_VALUES, is_zero
from moe_plugin.checkpoint.reshard import COLUMNS, GROUPS
from moe_plugin.checkpoint.source import (
    MODEL,
    MODEL_ONLY,
    WEIGHTS,
    CheckpointError,
    Derived,
    Source,
    View,
)
from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer

logger = logging.getLogger(__name__)
_FIELDS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # shaped as their parameters
_STEP = "step"


def to_neutral(source: Source) -> Source:
    """A view of a `fairseq` source with neutral names and settings."""
    state = source.values[STATE]
    model = to_decoder(source, model_arguments(state))
    kept = View(source, map(source.tensor, _kept(source)))
    derived = list(neutral_tensors(kept, model.tied))
    layers = {neutral_prefix(prefix): {"num_experts": layer["num_experts"]}
              for prefix, layer in source.layers.items()}
    values = {name: value for name, value in source.values.items()
              if name not in (COLUMNS, GROUPS, PARAMETERS, "settings")}
    values |= {"model": model.to_dict(), "step": source.values["step"] or 0}
    if any(one.key[0] != MODEL for one in derived):
        values["optimizer"] = _optimizer_values(source)
    return View(source, derived, format=NEUTRAL, layers=layers, values=values)


def _kept(source: Source) -> list[tuple[str, str]]:
    """Tensors that can have neutral names, by field."""
    fields = dict.fromkeys(field for field, _ in source.entries)
    more = [field for field in fields if field in WEIGHTS and field != MODEL]
    if source.values.get(MODEL_ONLY):
        if more:
            logger.info("left out: %s, which no other format holds", ", ".join(more))
        return [key for key in source.entries if key[0] == MODEL]
    odd = [*more, *(field for field in fields if field not in (MODEL, *_FIELDS, *WEIGHTS, _STEP))]
    if odd:
        raise CheckpointError(f"the checkpoint has {odd[0]!r}, which no other format holds; "
                              "convert the model alone (--model-only)")
    optimizer = source.values[STATE].get(OPTIMIZER)
    if optimizer and source.values.get(GROUPS) is None:
        raise CheckpointError(
            "the checkpoint has optimizer state that does not say which parameters it is of (in "
            "several parts, or flattened and of another length than the model's parameters); "
            "convert the model alone (--model-only)")
    return [key for key in source.entries if key[0] != _STEP]


def _optimizer_values(source: Source) -> dict[str, Any]:
    groups = source.values.get(GROUPS) or []
    if len(groups) != 1:
        raise CheckpointError(f"the optimizer has {len(groups)} groups of parameters, other "
                              "formats have other ones; convert the model alone (--model-only)")
    steps = {int(value) for value in source.values.get(COLUMNS, {}).get(_STEP, {}).values()}
    steps |= {int(source.read(key)) for key in source.entries if key[0] == _STEP}
    if len(steps) > 1:
        raise CheckpointError(f"the optimizer counts other steps for some parameters "
                              f"{sorted(steps)}, other formats have one count; convert the model "
                              "alone (--model-only)")
    known = {name: value for name, value in groups[0].items() if name in OPTIMIZER_VALUES}
    return {**known, "step": steps.pop() if steps else source.values["step"] or 0}


def from_neutral(source: Source) -> Source:
    """A view of a neutral source with the names of our fairseq models."""
    odd = sorted({field for field, _ in source.entries} - {MODEL, *_FIELDS})
    if odd:
        what = "float32 master weights" if odd[0] == "master" else f"{odd[0]!r} of the optimizer"
        raise CheckpointError(f"fairseq's files do not hold {what}; convert the model alone "
                              "(--model-only)")
    source = _without_router_biases(source)
    old = source.values.get(STATE) or {}
    arguments = from_decoder(source, model_arguments(old))
    tied = arguments["share_decoder_input_output_embed"]
    plain = arguments["no_token_positional_embeddings"]
    tensors = list(fairseq_tensors(source))
    tensors += more_tensors(tensors, tied,
                            not plain and not arguments["decoder_learned_pos"])
    layers = {our_prefix(prefix): dict(layer) for prefix, layer in source.layers.items()}
    order = _order(source, [one.key[1] for one in tensors if one.key[0] == MODEL], tied)
    places = {name: place for place, name in enumerate(order)}  # files have fairseq's order
    tensors.sort(key=lambda one: places.get(one.key[1], len(places)))
    state = _state(source, old, arguments, _trained(tensors, order))
    return View(source, tensors, format="fairseq", layers=layers, values={
        "step": source.values.get("step") or 0, STATE: state, PARAMETERS: order,
        GROUPS: (state.get(OPTIMIZER) or {}).get("param_groups"),
        COLUMNS: _columns(source, _trained(tensors, order)),
        **({MODEL_ONLY: True} if source.values.get(MODEL_ONLY) else {})})


def _without_router_biases(source: Source) -> Source:
    """Biases of routers, which ours does not have: left out where they are zero."""
    biases = [f"{prefix}router.bias" for prefix in source.layers]
    for name in biases:
        if (MODEL, name) in source.entries and not is_zero(source, name):
            raise CheckpointError(f"{name!r} is not zero: our router has no bias; train with "
                                  "--disable-bias-linear, or choose another format")
    return View(source, (source.tensor(key) for key in source.entries if key[1] not in biases))


def _order(source: Source, names: Sequence[str], tied: bool) -> list[str]:
    """All parameters as the model registers them."""
    inner: list[str] = []
    if source.layers:
        settings = layer_settings(source, next(iter(source.layers)))
        layer = MoELayer(from_dict({**settings, "losses": {"switch": 0.01}}), device="meta")
        inner = [name for name, _ in layer.named_parameters()]
    return parameter_order(names, inner, tied)


def _trained(tensors: Sequence[Derived], order: Sequence[str]) -> list[str]:
    """Parameters with optimizer state.

    Raises:
        CheckpointError: some parameters have none.
    """
    found = {one.key[1] for one in tensors if one.key[0] != MODEL}
    missing = [name for name in order if name not in found] if found else []
    if missing:
        raise CheckpointError(f"the optimizer has no state for {missing[0]!r}; convert the model "
                              "alone (--model-only)")
    return list(order) if found else []


def _columns(source: Source, trained: Sequence[str]) -> dict[str, dict[str, Any]]:
    step = (source.values.get("optimizer") or {}).get("step", 0)
    return {_STEP: dict.fromkeys(trained, int(step))} if trained else {}


def _state(source: Source, old: Mapping[str, Any], arguments: Mapping[str, Any],
           trained: Sequence[str]) -> dict[str, Any]:
    """What a file has besides tensors."""
    step = int(source.values.get("step") or 0)
    state = {**_fresh(step, bool(source.layers)), **old}
    state.pop(OPTIMIZER, None)
    if old.get("args"):
        state["args"] = Namespace(**{**vars(old["args"]), **arguments})
    else:
        state["cfg"] = {**state["cfg"], "model": dict(arguments)}
    if trained:
        group = {"lr": 0.0, "weight_decay": 0.0, **(source.values.get("optimizer") or {})}
        group.pop(_STEP, None)
        state[OPTIMIZER] = {"param_groups": [
            {**group, "amsgrad": False, "params": list(range(len(trained)))}]}
    state.pop(files.MANIFEST, None)
    if source.layers:
        experts = next(iter(source.layers.values()))["num_experts"]
        state[files.MANIFEST] = {"version": files.VERSION, "num_experts": experts, "world_size": 1,
                                 "rank": 0, "expert_parallel_size": 1, "num_updates": step}
    return state


def _fresh(step: int, moe: bool) -> dict[str, Any]:
    """Settings and histories of a run that fairseq has not made; as `Trainer.state_dict`."""
    criterion = "moe_cross_entropy" if moe else "cross_entropy"
    history = {"criterion_name": "MoECrossEntropyCriterion" if moe else "CrossEntropyCriterion",
               "optimizer_name": "FairseqAdam", "lr_scheduler_state": {"best": None},
               "num_updates": step}
    return {
        "args": None,
        "cfg": {"_name": None, "common": {}, "criterion": {"_name": criterion},
                "task": {"_name": "language_modeling"}},
        "criterion": None, "optimizer_history": [history], "task_state": {},
        "extra_state": {
            "metrics": {}, "previous_training_time": 0.0,
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0,
                               "shuffle": True}},
    }
