"""Checkpoints of a model with streamed weights.

A checkpoint folder, such as `ROOT/iter_0000100`, contains one safetensors file per part of the
model, and the progress of the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from moe_plugin.comm.host_collectives import refused_together
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron.model_settings import differs, read_progress
from moe_plugin.hosts.megatron.streamed import StreamedModel
from moe_plugin.hosts.megatron.streamed_optimizer import StreamedOptimizer
from moe_plugin.memory.weights.files import load_weights, save_weights
from moe_plugin.utils import checksums
from moe_plugin.utils.regular_files import write_whole

META, _SCALER = "streamed.json", "loss_scaler"
_RANKS = "ranks (all, tensor-, expert-, expert-tensor-parallel)"


def save(root: str, model: StreamedModel, optimizer: StreamedOptimizer,
         settings: Mapping[str, Any], progress: Mapping[str, Any]) -> str:
    """Write a checkpoint and return the path of its folder.

    Args:
        root: path of the folder that contains the checkpoints.
        settings: settings of the model, as returned by `model_settings`. See `model_settings`.
        progress: progress of the run, as a dict of JSON values by name. The dict must contain
            "iteration" and "consumed_samples".
    Raises:
        ValueError: If the checkpoint cannot be written. Earlier checkpoints are not changed.
        FloatingPointError: On all ranks, if a weight or an optimizer state is not finite on any
            rank. The incomplete checkpoint does not become the newest checkpoint.
    """
    folder = files.folder(root, progress["iteration"])
    if (scaler := model.scaler) is not None:
        progress = {**progress, _SCALER: {name: float(x) for name, x in
                                          scaler.state_dict().items()}}
    outer = None if model.peers is None else model.peers.outer_state
    several = dist.get_world_size() > 1
    try:
        with refused_together("a checkpoint") if several else nullcontext():
            save_weights(model.trainer, _own(folder), outer, finite=True)
    except (ValueError, FloatingPointError):
        if several:  # the parts of the other ranks are useless without the part that is missing
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if dist.get_rank() > 0:
        return folder
    write_whole(Path(folder, META), checksums.seal_json(
        {**progress, "settings": dict(settings), "optimizer": optimizer.kind,
         "ranks": _ranks()}))
    write_whole(Path(root, files.LATEST), str(progress["iteration"]))
    return folder


def load(root: str, model: StreamedModel, optimizer: StreamedOptimizer | None,
         settings: Mapping[str, Any], iteration: int | None = None) -> dict[str, Any]:
    """Load a checkpoint that `save` has written, and return the progress of the run.

    If `root` contains no checkpoint, a training run logs a warning and this function returns {}.

    Args:
        optimizer: optimizer into which the state is loaded, or None if the run only evaluates.
        iteration: iteration of the checkpoint to load. By default, the newest checkpoint is loaded.
    Raises:
        ValueError: If the checkpoint belongs to a different model, is damaged, or does not contain
            streamed weights. A missing checkpoint is also an error if the run only evaluates.
    """
    found = read_progress(
        root, iteration, META, settings, "the checkpoint was not written with --weights-on host. "
        "Pass another folder to --load, or use --weights-on device.", optimizer is None)
    if found is None:
        return {}
    progress, folder = found[0], str(found[1])
    if optimizer is not None and progress.get("optimizer", optimizer.kind) != optimizer.kind:
        raise ValueError(differs(folder, "optimizer", progress["optimizer"], optimizer.kind))
    if (ranks := progress.get("ranks", [1])) != _ranks():
        raise ValueError(differs(folder, _RANKS, ranks, _ranks()))
    load_weights(model.trainer, _own(folder))
    if model.scaler is not None and (scaler := progress.pop(_SCALER, {})):
        model.scaler.load_state_dict({name: torch.tensor([x]) if name == "scale" else int(x)
                                      for name, x in scaler.items()})
    model.loaded = Path(_own(folder))
    return progress


def _own(folder: str) -> str:
    return folder if dist.get_world_size() == 1 else os.path.join(
        folder, f"rank_{dist.get_rank():05d}")


def _ranks() -> list[int]:
    """Return a list that starts with the number of ranks. If there is more than one rank, the list
    continues with the sizes of the parallel groups.
    """
    if dist.get_world_size() == 1:
        return [1]
    return [dist.get_world_size(), ps.get_tensor_model_parallel_world_size(),
            ps.get_expert_model_parallel_world_size(),
            ps.get_expert_tensor_parallel_world_size()]
