"""Frozen experts in Megatron (`finetune.frozen_experts`), and adapters on experts
(`finetune.lora_rank`).

A layer rounds its initial weights to codes when it is built. Megatron's wrapper and optimizer are
created later, and therefore contain only parameters that are trained. Codes and adapters are stored
in distributed checkpoints by the global index of their expert, like all other expert parameters. If
a checkpoint contains weights instead of codes, every rank reads its experts from the files and
rounds them, one matrix of one expert at a time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.checkpoint.formats.megatron.format import PAIRS
from moe_plugin.checkpoint.source import Derived
from moe_plugin.comm.host_collectives import refused_together
from moe_plugin.config import flatten, to_dict
from moe_plugin.config.refusals import Values
from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.experts.frozen import check_format, freeze
from moe_plugin.experts.lora import ADAPTER_AXIS, TARGETS, ExpertRanks
from moe_plugin.hosts.megatron.compat.names import LocalNonpersistentObject, ShardedTensor
from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.hosts.megatron.refusals import FROZEN
from moe_plugin.kernels.frozen import FROZEN_AXIS, PARTS, quantized
from moe_plugin.layer import MoELayer

logger = logging.getLogger("moe_plugin.megatron")
_FORMAT = "frozen_format"  # attribute of codes and scales: the key of `FROZEN_FORMATS`
Leaves = dict[str, ShardedTensor]  # the sharded tensors of a layer's experts, by parameter name


def prepare(moe: MoELayer, config: Any, plan: Any) -> None:
    """Freeze the experts of a new layer and add adapters, if the settings of the run request it.

    Args:
        config: `TransformerConfig`.
        plan: the translated settings of the layer.
    Raises:
        ValueError: If another setting does not support such experts, or if their widths do not fit
            the number format.
    """
    asked, experts = plan.run.finetune, moe.experts
    if not asked.freezes:
        return
    FROZEN.refuse(Values({**flatten(to_dict(plan.config)), **flatten(to_dict(plan.run))},
                         functools.partial(setting, config)))
    assert isinstance(experts, FFNExperts)
    experts.requires_grad_(False)
    if asked.frozen_experts != "none":
        try:
            check_format(experts, asked.frozen_experts)
        except ValueError as error:
            raise ValueError(f"finetune.frozen_experts={asked.frozen_experts}: {error}") from error
        freeze(experts, asked.frozen_experts)
        for parameter in experts.parameters():
            setattr(parameter, _FORMAT, asked.frozen_experts)
    if asked.lora_rank:
        ranks = dict.fromkeys(TARGETS.values(), [asked.lora_rank] * moe.config.num_experts)
        # torch's generator is in the same state on all ranks; see `parameters.initialise`
        experts.add_lora(ExpertRanks(ranks, dict.fromkeys(ranks, asked.lora_alpha)),
                         int(torch.randint(2**31, ())))
    moe.follow_parameters()
    moe.ddp_check.begin(experts)


def fill(models: Sequence[dict[str, Any]], path: str, tensors: Mapping[str, Derived],
         optimizer: bool) -> None:
    """Prepare the sharded state of models for loading a checkpoint whose experts differ in codes or
    adapters. This is a collective operation.

    Codes that the checkpoint does not contain are computed from its weights, and adapters that it
    does not contain keep their initial values. Both are removed from the requested tensors.

    Args:
        models: sharded state dicts of model chunks, which are modified in place.
        path: folder of the checkpoint.
        tensors: the tensors in the checkpoint, by name.
        optimizer: whether the state of the optimizer is also loaded.
    Raises:
        ValueError: If the run would ignore codes or adapters in the checkpoint, or would use them
            with other settings.
    """
    with refused_together("the check of the stages' experts"):
        missing = [_fill(model, prefix, leaves, tensors, path, optimizer)
                   for model, prefix, leaves in _layers(models)]
    if any(missing) and dist.get_rank() == 0:
        logger.info("the experts' codes are computed from the weights in %s, and adapters that it "
                    "does not contain keep their initial values", path)


def _layers(models: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, Leaves]]:
    """Yield the state dict, the prefix and the expert tensors of each layer of this package."""
    for model in models:
        layers: dict[str, Leaves] = {}
        for key, leaf in model.items():
            prefix, _, name = key.rpartition(".experts.")
            if prefix and isinstance(leaf, ShardedTensor) and not prefix.endswith(".experts"):
                layers.setdefault(f"{prefix}.experts.", {})[name] = leaf
        for prefix, leaves in layers.items():
            yield model, prefix, leaves


def _fill(model: dict[str, Any], prefix: str, leaves: Leaves, tensors: Mapping[str, Derived],
          path: str, optimizer: bool) -> bool:
    """Prepare one layer. See `fill`. Return true if codes or adapters are missing in the
    checkpoint.
    """
    stem = next(iter(leaves.values())).key.rpartition(".")[0]
    for name in (*FROZEN_AXIS, *ADAPTER_AXIS):
        stored, leaf = tensors.get(f"{stem}.{name}"), leaves.get(name)
        if stored is not None and (leaf is None or stored.entry.shape != tuple(leaf.global_shape)):
            other = "no such tensor" if leaf is None else f"the shape {tuple(leaf.global_shape)}"
            raise ValueError(
                f"checkpoint {path!r} has {stem}.{name} of the shape {stored.entry.shape}, but "
                f"this run has {other}. Use the --moe-frozen-experts and --moe-expert-lora-rank "
                "with which the checkpoint was saved")
    missing = [name for name in leaves if name in {**FROZEN_AXIS, **ADAPTER_AXIS}
               and f"{stem}.{name}" not in tensors]
    if missing and optimizer:
        raise ValueError(
            f"checkpoint {path!r} has no {stem}.{missing[0]}, so its optimizer state belongs to "
            "other parameters. Use --finetune or --pretrained-checkpoint to start a new run from "
            "its weights, or --no-load-optim")
    for weight, names in PARTS.items():
        if names[0] in missing:
            _round([leaves[name] for name in names if name in leaves], weight, tensors, path)
    for name in missing:
        model[prefix + name] = LocalNonpersistentObject(leaves[name].data)
    return bool(missing)


@torch.no_grad()
def _round(parts: list[ShardedTensor], weight: str, tensors: Mapping[str, Derived],
           path: str) -> None:
    """Read the weights of this rank's experts, and round them to the codes and scales `parts`. Only
    one matrix is read at a time.
    """
    codes, ahead = parts[0], parts[0].prepend_axis_num
    format, (*layer, first) = getattr(codes.data, _FORMAT), codes.global_offset[:ahead + 1]
    for slot in range(codes.local_shape[0]):
        at = tuple(slice(index, index + 1) for index in (*layer, first + slot))
        matrix_OI = _matrix_OI(codes.key.rpartition(".")[0], weight, tensors, at, path)
        for leaf, value in zip(parts, quantized(matrix_OI, format), strict=True):
            whole = tuple(leaf.global_shape[ahead + 1:])
            if tuple(value.shape) != whole:
                raise ValueError(
                    f"checkpoint {path!r} has {weight} matrices of the shape "
                    f"{tuple(matrix_OI.shape)} for {leaf.key}, which do not fit this run. Use the "
                    "widths with which the checkpoint was saved")
            window = tuple(slice(start, start + size) for start, size in zip(
                leaf.global_offset[ahead + 1:], leaf.local_shape[1:], strict=True))
            leaf.data[slot] = value[window]


def _matrix_OI(stem: str, weight: str, tensors: Mapping[str, Derived],
               at: tuple[slice, ...], path: str) -> Tensor:
    """Read the matrix [O, I] of one expert, which is stored in this package's or in Megatron's
    format.

    at: the index of the expert, after the index of the layer if one tensor contains all layers.
    """
    if (stored := tensors.get(f"{stem}.{weight}")) is not None:
        sizes = stored.entry.shape[len(at):]
        return stored.read((*at, *(slice(0, size) for size in sizes))).view(sizes).T
    theirs, names = next((theirs, ours) for theirs, (ours, _) in PAIRS.items() if weight in ours)
    stored = tensors.get(f"{stem}.experts.{theirs}")
    if stored is None:
        raise ValueError(f"checkpoint {path!r} has neither {stem}.{weight} nor codes for it, so "
                         "the frozen experts would keep random values. Use a checkpoint that "
                         "contains the experts of all layers")
    outer, inner = stored.entry.shape[len(at):]
    gated = len(names) == 2 and f"{stem}.experts.linear_fc2.weight" in tensors and (
        outer == 2 * tensors[f"{stem}.experts.linear_fc2.weight"].entry.shape[-1])
    rows = slice(0, outer)
    if gated:  # the gate is the first half
        first = names.index(weight) * outer // 2
        rows = slice(first, first + outer // 2)
    return stored.read((*at, rows, slice(0, inner))).view(-1, inner)
