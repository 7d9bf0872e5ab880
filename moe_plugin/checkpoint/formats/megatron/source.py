"""Read a distributed checkpoint of Megatron as a `Source`.

The source can read the folders that the training script or Megatron itself writes (`iter_NNNNNNN`,
or its parent folder with `latest_checkpointed_iteration.txt`). Optimizer state must be stored by
parameter name. Megatron stores optimizer state by parameter name without
`--use-distributed-optimizer`, and with the sharding type `fully_reshardable`. With any other
sharding type, only the ranks that wrote the optimizer state can read it.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_plugin.checkpoint import trust
from moe_plugin.checkpoint.formats.megatron import common as names
from moe_plugin.checkpoint.formats.megatron.common import (
    BACKEND,
    BY_PARAMETER,
    COMMON,
    META,
    NATIVE,
    OURS,
    RENAMED,
    folder_of,
    optimizer_parts,
)
from moe_plugin.checkpoint.formats.megatron.torch_dist import DistributedFiles
from moe_plugin.checkpoint.name_table import marked
from moe_plugin.checkpoint.source import (
    CheckpointError,
    Derived,
    DerivedSource,
    Source,
    refused_if_unreadable,
)
from moe_plugin.experts.distributed_state import FLOAT32
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input

# entries of `META` that must be mappings
_MAPPINGS = ("files", "checksums", "layout", "model", "settings")


def open_checkpoint(path: Path, trusted: bool = False) -> Source:
    """Open a distributed checkpoint. The tensor names of the source include the layer index.

    The `values` of the source have the keys "step", "consumed_samples" (if known), "settings"
    (model settings under Megatron's names) and "megatron". `values["megatron"]` contains data for
    the writers of these formats: "common" is the content of `common.pt`, "objects" maps each object
    name to a function that reads the object's bytes, "stacked" states whether one tensor contains
    all layers, "master" is the name of the master weights, "layout" contains the parallel sizes,
    and "sharding_type" is the sharding type of the optimizer state. The file `moe_plugin.json`
    contains the checksums of the files. A checksum is verified when the file is first read.

    Args:
        path: folder of the checkpoint, or the parent of this folder.
        trusted: whether to unpickle arbitrary classes. Unpickling can run code that is stored in
            the files.
    Raises:
        CheckpointError: If a file is missing or damaged.
        UntrustedFile: If a file contains classes that are not from torch or Megatron, and `trusted`
            is False.
    """
    folder = folder_of(path)
    _check_backend(folder)
    meta = _read_meta(folder)
    files = DistributedFiles(folder, meta.get("checksums"), trusted)
    tensors, common = files.tensors(), _read_common(files, trusted)
    sharding_type = _sharding_type(files, tensors, common)
    if sharding_type not in (None, BY_PARAMETER):
        tensors = {name: one for name, one in tensors.items()
                   if "optimizer." not in name.partition("decoder.")[0]}
    _refuse_single_experts(str(folder), tensors)
    values = _values(files, meta, common, tensors, sharding_type)
    derived = list(names.by_layer(tensors))
    ours = values["settings"].get("moe_plugin") or {}
    kept = {FLOAT32: ["router."]} if ours.get("router.fp32") else {}
    layers = {name: {**layer, **kept} for name, layer in names.moe_layers(derived).items()}
    return DerivedSource(
        marked(derived, layers), NATIVE if names.is_native(tensors) else OURS, values, layers,
        {**values["megatron"]["layout"], "optimizer": sharding_type or "none"},
        [folder / name for name in files.file_names()], files.unsealed())


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND
    with refused_if_unreadable(
            f"{str(folder)!r} is not a distributed checkpoint of Megatron: {BACKEND} "
            "cannot be read", "use the folder iter_... or its parent folder"):
        check_input(path)
        backend = json.loads(path.read_text(encoding="utf-8")).get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(
            f"checkpoint {str(folder)!r} has sharded_backend={short(backend)}, but only "
            "'torch_dist' is supported; save it with --ckpt-format torch_dist")


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    if not path.exists():
        return {}
    with refused_if_unreadable(f"checkpoint {str(folder)!r} has no readable {META}",
                               "use another checkpoint"):
        check_input(path)
        meta, _ = checksums.open_json(path.read_text(encoding="utf-8"))
        wrong = [name for name in _MAPPINGS if not isinstance(meta.get(name, {}), dict)]
        if wrong:
            raise ValueError(f"{wrong[0]}={short(meta[wrong[0]])} must be a mapping")
        sizes = meta.get("files", {})
        for name, size in sizes.items():
            found = folder / name
            if not found.is_file() or found.stat().st_size != size:
                raise CheckpointError(
                    f"checkpoint {str(folder)!r} is damaged: {name} must have {size} bytes; "
                    "restore the file or use another checkpoint")
    return meta


def _read_common(files: DistributedFiles, trusted: bool) -> dict[str, Any]:
    path = files.folder / COMMON
    # Megatron-core 0.19 stores the common state among the objects
    inside = next((name for name in files.objects()
                   if name.startswith("common_state/shard_")), None)
    with refused_if_unreadable(f"checkpoint file {str(path)!r} cannot be read",
                               "use another checkpoint"):
        if inside is not None and not path.exists():
            common = _load(io.BytesIO(files.read_object(inside)), inside, trusted)[0]
        else:
            check_input(path)
            common = _load(path, str(path), trusted)
        if not isinstance(common, dict):
            raise ValueError(f"it contains a {type(common).__name__}, but a mapping was expected")
    return common


def _sharding_type(files: DistributedFiles, tensors: Mapping[str, Derived],
                   common: Mapping[str, Any]) -> str | None:
    """Return the sharding type of the optimizer state, or None if there is no optimizer state."""
    told = [part.get("param_state_sharding_type")
            for part in optimizer_parts(common.get("optimizer"))]
    for name in files.objects():
        if ".param_state_sharding_type/" in name:
            told.append(_load(io.BytesIO(files.read_object(name)), name, False)[0])
    other = next((one for one in told if one not in (None, BY_PARAMETER)), None)
    if other is not None:
        return str(other)
    state = [name for name in tensors if "optimizer." in name.partition("decoder.")[0]]
    for name in state:
        field, parameter = names.split_field(name)
        model = tensors.get(parameter)
        if field == "model" or model is not None and model.entry.shape != tensors[name].entry.shape:
            return "fully_sharded_model_space"
    return BY_PARAMETER if state or any(told) else None


def _values(files: DistributedFiles, meta: Mapping[str, Any], common: dict[str, Any],
            tensors: Mapping[str, Derived], sharding_type: str | None) -> dict[str, Any]:
    progress = common.get("progress") or {}
    arguments = common.get("args")
    given = plain_settings(arguments)
    settings = meta.get("settings") or {**given, **meta.get("model", {})}
    step = meta.get("iteration", common.get("iteration", progress.get("iteration", 0)))
    samples = meta.get("consumed_samples", settings.get("consumed_train_samples"))
    stored = {name.removeprefix("optimizer.state.").partition(".")[0] for name in tensors
              if name.startswith("optimizer.state.")}
    return {
        "step": step, "settings": settings,
        **({} if samples is None else {"consumed_samples": samples}),
        "megatron": {
            "common": common, "meta": meta, "objects": {
                name: partial(files.read_object, name)
                for name in files.objects()},
            "stacked": any(names.is_stacked(names.split_field(name)[1]) for name in tensors),
            "master": next((name for name in names.MASTERS if name in stored), None),
            "layout": meta.get("layout") or _sizes(settings),
            "sharding_type": sharding_type,
        }
    }


def _load(file: Any, what: str, trusted: bool) -> Any:
    if trusted:
        return torch.load(file, map_location="cpu", weights_only=False)
    try:
        return trust.load(file, [argparse.Namespace], what, map_location="cpu")
    except trust.UntrustedFile:
        try:  # Megatron's own list, if it is installed; the import takes seconds
            from megatron.core.safe_globals import SAFE_GLOBALS
        except ImportError:
            SAFE_GLOBALS = []
        if not SAFE_GLOBALS:
            raise
        return trust.load(file, [argparse.Namespace, *SAFE_GLOBALS], what, map_location="cpu")


def plain_settings(arguments: Any) -> dict[str, Any]:
    """Convert the arguments of Megatron's training script to JSON values. Arguments that cannot be
    represented in JSON are omitted. Renamed arguments also have the names that this package uses.
    """
    if not isinstance(arguments, argparse.Namespace):
        return {}
    kept = {}
    for name, value in vars(arguments).items():
        if value is None or isinstance(value, str | bool | int) or isinstance(
                value, float) and math.isfinite(value) or isinstance(value, list) and all(
                    isinstance(item, str | int | float) for item in value):
            kept[name] = value
    newer_names = {"norm_epsilon": "layernorm_epsilon", **RENAMED}
    return {known: kept[newer] for known, newer in newer_names.items() if newer in kept} | kept


def _sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    known = {"world": "world_size", "tensor": "tensor_model_parallel_size",
             "pipeline": "pipeline_model_parallel_size", "expert": "expert_model_parallel_size",
             "expert_tensor": "expert_tensor_parallel_size"}
    return {name: settings[theirs] for name, theirs in known.items() if theirs in settings}


def _refuse_single_experts(folder: str, tensors: Iterable[str]) -> None:
    for name in tensors:
        if name.partition(names.NATIVE_EXPERTS)[2][:1].isdecimal():
            raise CheckpointError(
                f"checkpoint {folder!r} stores each expert under a separate name ({name!r}), which "
                "is not supported; save it with singleton_local_shards=False")
