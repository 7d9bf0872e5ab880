"""A distributed checkpoint of Megatron as a source of tensors.

Read are folders of the training script and of Megatron itself (`iter_NNNNNNN`, or the folder above
with `latest_checkpointed_iteration.txt`), with the optimizer state that is stored by parameter:
Megatron's optimizers without and with `--use-distributed-optimizer` in the sharding type
`fully_reshardable`. What other sharding types store depends on the ranks that wrote it.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.checkpoint import checksums, trust
from moe_plugin.checkpoint.formats.megatron import names
from moe_plugin.checkpoint.formats.megatron.common import BY_PARAMETER, optimizer_parts
from moe_plugin.checkpoint.formats.megatron.names import (
    BACKEND,
    COMMON,
    META,
    NATIVE,
    OURS,
    folder_of,
)
from moe_plugin.checkpoint.formats.megatron.torch_dist import DistributedFiles
from moe_plugin.checkpoint.precision import mark_float32
from moe_plugin.checkpoint.source import (
    CheckpointError,
    Key,
    Source,
    TensorEntry,
    Window,
    refused_if_unreadable,
)
from moe_plugin.messages import short
from moe_plugin.regular_files import check_input
from moe_plugin.routing.contract import FLOAT32

_MAPPINGS = ("files", "checksums", "layout", "model", "settings")  # in `META`


class MegatronSource(Source):
    """An open distributed checkpoint; tensors by numbered layer.

    `values`: "step"; "consumed_samples" where known; "settings", the model's in Megatron's names;
    "megatron", what a writer of these formats needs: "common" (the content of `common.pt`),
    "objects" (by name, what reads its bytes), "stacked" (all layers in one tensor), "master" (name
    of master weights), "layout" (parallel sizes), "sharding_type" (of the optimizer's state).

    Args:
        path: the checkpoint's folder or the one above.
        trusted: unpickle any class, which can run code in the files.
    Raises:
        CheckpointError: a file is missing or damaged.
        UntrustedFile: it names other classes than torch's and Megatron's own, and is not trusted.
    """

    def __init__(self, path: Path, trusted: bool = False) -> None:
        self.folder = folder_of(path)
        self._check_backend()
        self._meta = self._read_meta()
        self._files = DistributedFiles(self.folder, self._meta.get("checksums"), trusted)
        tensors = self._files.tensors()
        self.format = NATIVE if names.is_native(tensors) else OURS
        common = self._read_common(trusted)
        self.sharding_type = self._sharding_type(tensors, common)
        if self.sharding_type not in (None, BY_PARAMETER):
            tensors = {name: one for name, one in tensors.items()
                       if "optimizer." not in name.partition("decoder.")[0]}
        _refuse_single_experts(str(self.folder), tensors)
        entries, self._places = names.by_layer(tensors)
        self.values = self._values(common, tensors)
        ours = self.values["settings"].get("moe_plugin") or {}
        kept = {FLOAT32: ["router."]} if ours.get("router.fp32") else {}
        self.layers = {name: {**layer, **kept}
                       for name, layer in names.moe_layers(entries).items()}
        self.entries = mark_float32(entries, self.layers)

    def _read(self, key: Key, window: Window) -> Tensor:
        place = self._places[key]
        if place.layer is None:
            return self._files.read(place.name, window)
        return self._files.read(place.name, (slice(place.layer, place.layer + 1), *window))[0]

    def describe(self) -> Mapping[str, Any]:
        """Parallel sizes of the run that wrote it, sharding type of the optimizer."""
        return {**self.values["megatron"]["layout"], "optimizer": self.sharding_type or "none"}

    def files(self) -> Sequence[Path]:
        """See `Source`. Checksums of these are in `moe_plugin.json`, and verified when a file is
        first read.
        """
        return [self.folder / name for name in self._files.file_names()]

    def _check_backend(self) -> None:
        path = self.folder / BACKEND
        with refused_if_unreadable(
                f"{str(self.folder)!r} is not a distributed checkpoint of Megatron: {BACKEND} "
                "cannot be read", "give the folder iter_... or the one above"):
            check_input(path)
            backend = json.loads(path.read_text(encoding="utf-8")).get("sharded_backend")
        if backend != "torch_dist":
            raise CheckpointError(
                f"checkpoint {str(self.folder)!r} has sharded_backend={short(backend)}: must be "
                "'torch_dist'; save it with --ckpt-format torch_dist")

    def _read_meta(self) -> dict[str, Any]:
        path = self.folder / META
        if not path.exists():
            return {}
        with refused_if_unreadable(f"checkpoint {str(self.folder)!r} has no readable {META}",
                                   "use another one"):
            check_input(path)
            meta, _ = checksums.open_json(path.read_text(encoding="utf-8"))
            wrong = [name for name in _MAPPINGS if not isinstance(meta.get(name, {}), dict)]
            if wrong:
                raise ValueError(f"{wrong[0]}={short(meta[wrong[0]])} must be a mapping")
            sizes = meta.get("files", {})
            for name, size in sizes.items():
                found = self.folder / name
                if not found.is_file() or found.stat().st_size != size:
                    raise CheckpointError(
                        f"checkpoint {str(self.folder)!r} is damaged: {name} must have {size} "
                        "bytes; restore the file or use another checkpoint")
        return meta

    def _read_common(self, trusted: bool) -> dict[str, Any]:
        path = self.folder / COMMON
        # Megatron-core 0.19 has it among the objects
        inside = next((name for name in self._files.objects()
                       if name.startswith("common_state/shard_")), None)
        with refused_if_unreadable(f"checkpoint file {str(path)!r} cannot be read",
                                   "use another checkpoint"):
            if inside is not None and not path.exists():
                found = _load(io.BytesIO(self._files.read_object(inside)), inside, trusted)[0]
            else:
                check_input(path)
                found = _load(path, str(path), trusted)
            if not isinstance(found, dict):
                raise ValueError("it is not a mapping")
        return found

    def _sharding_type(self, tensors: Mapping[str, TensorEntry],
                       common: Mapping[str, Any]) -> str | None:
        """How optimizer state is stored; None: there is none."""
        told = [part.get("param_state_sharding_type")
                for part in optimizer_parts(common.get("optimizer"))]
        for name in self._files.objects():
            if ".param_state_sharding_type/" in name:
                told.append(_load(io.BytesIO(self._files.read_object(name)), name, False)[0])
        other = next((one for one in told if one not in (None, BY_PARAMETER)), None)
        if other is not None:
            return str(other)
        state = [name for name in tensors if "optimizer." in name.partition("decoder.")[0]]
        for name in state:
            field, parameter = names.split_field(name)
            model = tensors.get(parameter)
            if field == "model" or model is not None and model.shape != tensors[name].shape:
                return "fully_sharded_model_space"
        return BY_PARAMETER if state or any(told) else None

    def _values(self, common: dict[str, Any], tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
        arguments = common.get("args")
        progress = common.get("progress") or {}
        given = _plain(arguments)
        if "layernorm_epsilon" in given:  # so its own script calls it in newer releases
            given = {"norm_epsilon": given["layernorm_epsilon"], **given}
        settings = self._meta.get("settings") or {**given, **self._meta.get("model", {})}
        step = self._meta.get("iteration", common.get("iteration", progress.get("iteration", 0)))
        samples = self._meta.get("consumed_samples", settings.get("consumed_train_samples"))
        stored = {name.removeprefix("optimizer.state.").partition(".")[0] for name in tensors
                  if name.startswith("optimizer.state.")}
        return {
            "step": step, "settings": settings,
            **({} if samples is None else {"consumed_samples": samples}),
            "megatron": {
                "common": common, "meta": self._meta, "objects": {
                    name: partial(self._files.read_object, name)
                    for name in self._files.objects()},
                "stacked": any(place.layer is not None for place in self._places.values()),
                "master": next((name for name in names.MASTERS if name in stored), None),
                "layout": self._meta.get("layout") or _sizes(settings),
                "sharding_type": self.sharding_type,
            }
        }


def _load(file: Any, what: str, trusted: bool) -> Any:
    if trusted:
        return torch.load(file, map_location="cpu", weights_only=False)
    try:
        return trust.load(file, [argparse.Namespace], what, map_location="cpu")
    except trust.UntrustedFile:
        try:  # Megatron's own list, where it is installed; importing it takes seconds
            from megatron.core.safe_globals import SAFE_GLOBALS
        except ImportError:
            SAFE_GLOBALS = []
        if not SAFE_GLOBALS:
            raise
        return trust.load(file, [argparse.Namespace, *SAFE_GLOBALS], what, map_location="cpu")


def _plain(arguments: Any) -> dict[str, Any]:
    """Arguments of Megatron's script as JSON values; those that are none are left out."""
    if not isinstance(arguments, argparse.Namespace):
        return {}
    kept = {}
    for name, value in vars(arguments).items():
        if value is None or isinstance(value, str | bool | int) or isinstance(
                value, float) and math.isfinite(value) or isinstance(value, list) and all(
                    isinstance(item, str | int | float) for item in value):
            kept[name] = value
    return kept


def _sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    known = {"world": "world_size", "tensor": "tensor_model_parallel_size",
             "pipeline": "pipeline_model_parallel_size", "expert": "expert_model_parallel_size",
             "expert_tensor": "expert_tensor_parallel_size"}
    return {name: settings[theirs] for name, theirs in known.items() if theirs in settings}


def _refuse_single_experts(folder: str, tensors: Mapping[str, TensorEntry]) -> None:
    for name in tensors:
        if name.partition(names.NATIVE_EXPERTS)[2][:1].isdecimal():
            raise CheckpointError(
                f"checkpoint {folder!r} stores each expert under its own name ({name!r}): not "
                "supported; save it with singleton_local_shards=False")
