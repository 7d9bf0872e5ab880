"""Upcycling of fairseq's translation models.

The tensors keep fairseq's names, because no other format supports encoders. Only the tensors of the
feed-forward networks change.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.formats.fairseq.entries import (
    CRITERION,
    OPTIMIZER,
    PARAMETERS,
    STATE,
)
from moe_plugin.checkpoint.formats.fairseq.neutral import model_arguments
from moe_plugin.checkpoint.layers import LAYER_NAMES
from moe_plugin.checkpoint.reshard import COLUMNS, GROUPS
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Derived, Source, View
from moe_plugin.checkpoint.upcycle import Upcycling, moe_tensors, refuse_experts, tell_left_out
from moe_plugin.config.flags import setting_specs

STACKS = ("encoder", "decoder")
# copies of its parameters that an encoder layer of fairseq >= 0.12 stores next to the originals
_COPIES = re.compile(r"(encoder)\.layers\.(\d+)\.(in_proj|out_proj|fc1|fc2)_(weight|bias)")
_MLP = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.fc([12])\.(weight|bias)")


def translates(source: Source) -> bool:
    """Return true if the source is a fairseq model whose encoder consists of transformer layers."""
    return source.format == "fairseq" and any(name.startswith("encoder.layers.")
                                              for _, name in source.entries)


def upcycle(source: Source, plan: Upcycling, check: Callable[[Namespace], None]) -> View:
    """Return a lazy view of a dense translation model in which experts replace MLPs. The view has
    fairseq's format.

    Args:
        source: checkpoint of the dense model.
        plan: number of experts, and the layers that receive experts.
        check: function of the host framework that raises `ValueError` if no model can be built from
            the new settings.
    Raises:
        CheckpointError: If the model already has MoE layers, if no layer would become an MoE layer,
            or if the settings do not support experts.
    """
    refuse_experts(source)
    every = {stack: plan.every if own is None else own for stack, own in zip(
        STACKS, (plan.encoder_every, plan.decoder_every), strict=True)}
    mlps = _mlps(source)
    chosen = {place: mlp for place, mlp in mlps.items()
              if every[place[0]] and (place[1] + 1) % every[place[0]] == 0}
    for stack, frequency in every.items():
        if (frequency or not any(every.values())) and not any(one == stack for one, _ in chosen):
            raise CheckpointError(f"no layer of the {stack} would become an MoE layer with "
                                  f"every={frequency}; use a smaller --every, or 0 for one of the "
                                  "two stacks")
    arguments = {**model_arguments(source.values[STATE]), **_flags(plan, every, chosen)}
    try:
        check(Namespace(**arguments))
    except ValueError as error:
            raise CheckpointError("the model cannot be converted to a model with experts: "
                                  f"{error}") from error
    tell_left_out(source)
    left = {name: value for name, value in source.values.items() if name not in (COLUMNS, GROUPS)}
    layers = {_prefix(place): {"num_experts": plan.experts} for place in chosen}
    return View(source, _tensors(source, plan, mlps, chosen), layers=layers, values={
        **left, PARAMETERS: [], STATE: _state(source.values, arguments, plan)})


def _mlps(source: Source) -> dict[tuple[str, int], dict[str, Derived]]:
    """Return the tensors of each MLP by stack, layer and framework-independent name."""
    mlps: dict[tuple[str, int], dict[str, Derived]] = {}
    for key in source.entries:
        if key[0] == MODEL and (name := _MLP.fullmatch(key[1])):
            part = f"{('w_in', 'w_out')[int(name[3]) - 1]}.{name[4]}"
            mlps.setdefault((name[1], int(name[2])), {})[part] = source.tensor(key)
    return mlps


def _prefix(place: tuple[str, int]) -> str:
    return f"{place[0]}.layers.{place[1]}.moe_layer.moe."


def _tensors(source: Source, plan: Upcycling, mlps: Mapping[tuple[str, int], Any],
             chosen: Mapping[tuple[str, int], Mapping[str, Derived]]) -> Iterator[Derived]:
    for key in source.entries:
        name = _MLP.fullmatch(key[1]) or _COPIES.fullmatch(key[1])
        if key[0] == MODEL and not (name and (name[1], int(name[2])) in chosen):
            yield source.tensor(key)
    for number, place in enumerate(mlps):
        if place in chosen:
            for tensor in moe_tensors(chosen[place], plan, number, ""):
                yield tensor.renamed(_prefix(place) + LAYER_NAMES[tensor.key[1]])


def _flags(plan: Upcycling, every: Mapping[str, int],
           chosen: Mapping[tuple[str, int], Mapping[str, Derived]]) -> dict[str, Any]:
    """Return the command-line flags with which fairseq can build the new model.

    Experts have the same inner width as the dense layers of their stack, unless `granularity`
    splits the MLPs or there is a shared expert.
    """
    settings: dict[str, Any] = {"router.top_k": plan.top_k, "router.normalize": "before_drop",
                                "router.normalize_min": 0.0}
    if plan.granularity > 1 or plan.shared:
        widths = {mlp["w_in.weight"].entry.shape[0] for mlp in chosen.values()}
        if len(widths) > 1:
            raise CheckpointError(
                f"the inner widths of encoder and decoder differ ({sorted(widths)}), but one flag "
                "sets both: use granularity=1 and shared=0, or --encoder-every 0")
        width = widths.pop()
        settings |= {"experts.hidden_dim": width // plan.granularity,
                     **({"experts.shared_hidden_dim": width,
                         "experts.shared_gate": plan.shared_gate} if plan.shared else {})}
    paths = {spec.path: spec.dest for spec in setting_specs()}
    return {"moe_freq": 0, **{f"{stack}_moe_freq": every[stack] for stack in STACKS},
            "moe_expert_count": plan.experts, "moe_top1_expert": False,
            "moe_second_expert_policy": "all", "moe_dispatch": "ragged",
            "moe_capacity_factor": "none",
            **{paths[path]: str(value) for path, value in settings.items()}}


def _state(values: Mapping[str, Any], arguments: Mapping[str, Any],
           plan: Upcycling) -> dict[str, Any]:
    """Return all entries of the checkpoint file that are not tensors."""
    old = values[STATE]
    state = {name: value for name, value in old.items() if name not in (OPTIMIZER, CRITERION)}
    if old.get("cfg") is not None:
        model = old["cfg"]["model"]
        state["cfg"] = {**old["cfg"], "model": Namespace(**arguments) if isinstance(
            model, Namespace) else dict(arguments)}
    else:
        state["args"] = Namespace(**{**vars(old["args"]), **arguments})
    state[files.MANIFEST] = {
        "version": files.VERSION, "num_experts": plan.experts, "world_size": 1, "rank": 0,
        "expert_parallel_size": 1, "num_updates": values["step"] or 0}
    return state
