"""Checkpoints of a model whose weights stream: `ROOT/iter_0000100` has a safetensors file for each
part, and the run's progress.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_plugin import checksums
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron.model_settings import check_settings, differs
from moe_plugin.hosts.megatron.streamed import StreamedModel, StreamedOptimizer
from moe_plugin.memory.weights.files import load_weights, save_weights
from moe_plugin.messages import short
from moe_plugin.regular_files import check_input, write_whole

META = "streamed.json"


def save(root: str, model: StreamedModel, optimizer: StreamedOptimizer,
         settings: Mapping[str, Any], progress: Mapping[str, Any]) -> str:
    """Write a checkpoint and return its folder.

    Args:
        settings: see `model_settings`.
        progress: at least "iteration" and "consumed_samples"; JSON values.
    Raises:
        ValueError: it cannot be written; older ones are untouched.
        FloatingPointError: a weight or state of an optimizer is not finite; nothing is written.
    """
    folder = files.folder(root, progress["iteration"])
    save_weights(model.trainer, folder, model.peers and model.peers.outer_state, finite=True)
    write_whole(Path(folder, META), checksums.seal_json(
        {**progress, "settings": dict(settings), "optimizer": optimizer.kind}))
    write_whole(Path(root, files.LATEST), str(progress["iteration"]))
    return folder


def load(root: str, model: StreamedModel, optimizer: StreamedOptimizer | None,
         settings: Mapping[str, Any], iteration: int | None = None) -> dict[str, Any]:
    """Load a checkpoint that `save` wrote; its progress, empty if it is absent, with a warning.

    Args:
        optimizer: None: the model only evaluates.
        iteration: None: the newest one.
    Raises:
        ValueError: it is of another model, damaged, or no checkpoint of streamed weights; or there
            is none to evaluate.
    """
    iteration = iteration or files.latest(root)
    if iteration is None:
        files.nothing_found(root, optimizer is None)
        return {}
    path = Path(files.folder(root, iteration)) / META
    if not path.exists():
        raise ValueError(f"{path.parent} has no {META}: it was not written with --weights-on host, "
                         "whose checkpoints are files of parts; give another folder to --load, or "
                         "use --weights-on device")
    check_input(path)
    try:
        meta, _ = checksums.open_json(path.read_text(encoding="utf-8"))
        progress = {**meta, "iteration": int(meta["iteration"]),
                    "consumed_samples": int(meta["consumed_samples"])}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({short(error)}): write the number of another folder "
                         f"into {os.path.join(root, files.LATEST)}") from error
    folder = str(path.parent)
    check_settings(folder, meta.get("settings") or {}, settings)
    if optimizer is not None and meta.get("optimizer", optimizer.kind) != optimizer.kind:
        raise ValueError(differs(folder, "optimizer", meta["optimizer"], optimizer.kind))
    load_weights(model.trainer, path.parent)
    model.loaded = path.parent
    return progress
