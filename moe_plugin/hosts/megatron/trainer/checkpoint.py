"""Checkpoints of the training script: Megatron's distributed checkpoint, complete or absent.

    SAVE/iter_0000100/...                      tensors by global index: loads at other sizes
    SAVE/iter_0000100/moe_plugin.json          model, parallel sizes, progress; size and checksum
                                               of every file
    SAVE/latest_checkpointed_iteration.txt     100

A checkpoint is written next to its final folder and renamed when complete; the file `latest...`
changes last.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from moe_plugin.checkpoint.formats.megatron import torch_dist
from moe_plugin.checkpoint.formats.megatron.common import refuse_other_optimizers
from moe_plugin.checkpoint.formats.megatron.names import BACKEND
from moe_plugin.checkpoint.formats.megatron.source import open_checkpoint
from moe_plugin.comm.host_collectives import collectives_named
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron import streamed_checkpoint
from moe_plugin.hosts.megatron.checkpoint_files import LATEST, folder, latest
from moe_plugin.hosts.megatron.compat import core, writers
from moe_plugin.hosts.megatron.compat import optimizer as optimizers
from moe_plugin.hosts.megatron.compat.names import DistributedOptimizer, ShardedObject
from moe_plugin.hosts.megatron.model_settings import check_settings, differs
from moe_plugin.hosts.megatron.trainer.model import Training

logger = logging.getLogger(__name__)
STAGES = "stage_layouts"  # of `layout`


@dataclass(frozen=True)
class Progress:
    """How far training is: steps done and samples of the training set consumed."""

    iteration: int = 0
    consumed_samples: int = 0


def layout(training: Training) -> dict[str, Any]:
    """The parallel sizes of this run, equal on all ranks."""
    sizes = {"world": dist.get_world_size(),
             "pipeline": ps.get_pipeline_model_parallel_world_size()}
    if training.stage_layouts:
        return {**sizes, STAGES: list(training.stage_layouts)}
    return {
        **sizes, "tensor": ps.get_tensor_model_parallel_world_size(),
        "expert": ps.get_expert_model_parallel_world_size(),
        "expert_tensor": ps.get_expert_tensor_parallel_world_size()
    }


def shape(training: Training) -> dict[str, Any]:
    """Settings of model and optimizer that must be equal for their state to fit."""
    config = training.config
    names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size",
             "num_moe_experts", "moe_ffn_hidden_size", "gated_linear_unit", "add_bias_linear",
             "normalization")
    found = {name: getattr(config, name) for name in names}
    if training.optimizer is None:
        return found
    parts = optimizers.parts(training.optimizer)
    return {**found, "distributed_optimizer": isinstance(parts[0], DistributedOptimizer),
            "optimizer": type(parts[0].optimizer).__name__}


def save(root: str, training: Training, progress: Progress) -> str:
    """Write a checkpoint and return its folder; a collective call.

    What was there before stays until the new one is complete.

    Raises:
        FloatingPointError: a weight, buffer or optimizer state of any rank is not finite; nothing
            is written.
        CheckpointError: it cannot be written; on every rank.
    """
    if training.streams:
        return streamed_checkpoint.save(root, training.chunks[0], training.optimizer,
                                        training.settings, asdict(progress))
    training.gather_parameters()
    files.refuse_not_finite(root, training.bare(), training.optimizer)
    final = folder(root, progress.iteration)
    part = files.part_of(final)

    def finish() -> None:
        if dist.get_rank() == 0:
            files.write_meta(part, _description(training, progress), sums)
            files.replace_folder(part, final)
            files.write_text(os.path.join(root, LATEST), str(progress.iteration))

    state = _state(training, loading=False, same_layout=True,
                   layers_apart=bool(training.stage_layouts))
    files.together(final, lambda: writers.save({**state, "progress": asdict(progress)}, part))
    sums = files.sums(part)
    files.together(final, finish)
    return final


def _description(training: Training, progress: Progress) -> dict[str, Any]:
    return {
        "model": shape(training), "settings": dict(training.settings), "layout": layout(training),
        **asdict(progress), "megatron_core": core.core_version
    }


def load(root: str, training: Training, trust: bool = False) -> Progress:
    """Load the newest checkpoint under `root`, or an older one if it is damaged.

    A collective call. Without a checkpoint, training starts from the beginning (with a warning),
    and an evaluation is refused.

    Args:
        root: folder of the checkpoints.
        training: what is loaded.
        trust: load also a checkpoint that could run code (see `torch_dist.check_classes`).
    Raises:
        ValueError: the checkpoint is of another model, incomplete, truncated or unreadable. Nothing
            is changed on disk.
    """
    if training.streams:
        found = streamed_checkpoint.load(root, training.chunks[0], training.optimizer,
                                         training.settings)
        return Progress(found["iteration"], found["consumed_samples"]) if found else Progress()
    iteration = latest(root)
    if iteration is None and (left := files.older(root, 10**15)):
        iteration = left[0]  # a killed save, or a lost file, must not lose what is there
        files.say_lost(root)
    if iteration is None:
        files.nothing_found(root, training.optimizer is None)
        return Progress()
    path = folder(root, iteration)
    meta = _of_megatron(path, trust)
    if meta is None:
        path, meta = files.newest_whole(root, iteration)
    check(path, meta, training)
    same = meta["layout"] == layout(training)
    apart = bool(meta["layout"].get(STAGES))
    if training.optimizer is not None:
        optimizers.prepare_optimizer_for_load(training.optimizer)
    with_optimizer = training.optimizer is not None
    with files.readable(path):
        if not trust:
            torch_dist.check_classes(path)
        state = _state(training, loading=True, same_layout=same, layers_apart=apart)
        if with_optimizer and not (with_optimizer := _has_optimizer(path, trust)):
            del state["optimizer"]
        # of layers that the checkpoint has as one tensor unequal stages ask for unequal parts
        with collectives_named(f"a collective of reading checkpoint {path!r}"):
            found = dist_checkpointing.load(
                state, path, validate_access_integrity=apart or not training.stage_layouts)
    for index, model in enumerate(training.bare()):
        model.load_state_dict(found[f"model{index}"])
    if with_optimizer:
        optimizers.load_optimizer(training.optimizer, found["optimizer"])
    elif training.optimizer is not None:
        training.optimizer.reload_model_params()
        logger.info("checkpoint %s has no optimizer state: the optimizer starts anew", path)
    if same:
        _set_random(found["random"])
    else:
        logger.info("checkpoint of %s loaded on %s; random states start from the seed",
                    meta["layout"], layout(training))
    return Progress(meta["iteration"], meta["consumed_samples"])


def _of_megatron(path: str, trust: bool) -> dict[str, Any] | None:
    """Description of a checkpoint that Megatron-LM's own script wrote; None: it is of another one.
    """
    if os.path.exists(os.path.join(path, files.META)) or not os.path.exists(
            os.path.join(path, BACKEND)):
        return None
    with open_checkpoint(Path(path), trust) as source:
        if "args" not in source.values["megatron"]["common"]:
            return None
        return {"model": {}, "settings": source.values["settings"], "layout": {},
                "iteration": source.values["step"],
                "consumed_samples": source.values.get("consumed_samples", 0)}


def _has_optimizer(path: str, trust: bool) -> bool:
    with open_checkpoint(Path(path), trust) as source:
        refuse_other_optimizers(source)
        return "optimizer" in source.values["megatron"]["common"]


def check(path: str, meta: dict[str, Any], training: Training) -> None:
    """`ValueError` where the checkpoint is of another model; a warning where settings differ that
    no tensor's shape says.
    """
    for name, mine in shape(training).items():
        # a conversion does not know all of them
        if name in meta["model"] and meta["model"][name] != mine:
            raise ValueError(differs(path, name, meta["model"][name], mine))
    check_settings(path, meta.get("settings") or {}, training.settings)


def _state(training: Training, *, loading: bool, same_layout: bool,
           layers_apart: bool) -> dict[str, Any]:
    # layers_apart: each layer's tensors by themselves. Megatron takes those of equal layers as one
    # tensor, whose parts must all have the same size
    metadata = optimizers.checkpoint_metadata()
    if layers_apart:
        metadata["non_homogeneous_layers"] = True
    models = {
        f"model{i}": core.call_supported(m.sharded_state_dict, metadata=metadata)
        for i, m in enumerate(training.bare())
    }
    state: dict[str, Any] = dict(models)
    if training.optimizer is not None:
        # nested: with virtual stages every chunk numbers its layers from 0, and keys would hide one
        # another
        state["optimizer"] = core.call_supported(training.optimizer.sharded_state_dict,
                                                 model_sharded_state_dict=models,
                                                 is_loading=loading, metadata=metadata)
    if same_layout:
        state["random"] = _random_shard()
    return state


def _random_shard() -> Any:
    states = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("random", states, (dist.get_world_size(),), (dist.get_rank(),))


def _set_random(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
