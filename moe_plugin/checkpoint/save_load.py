"""Atomic checkpoints for training in plain PyTorch. Any number of ranks can load a checkpoint.

See `formats.plain` for the files. Checksums are verified before loading.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint import torch_files
from moe_plugin.checkpoint.formats.plain import (
    check_part,
    open_folder,
    part_name,
    part_of_rank,
    read_index,
    write_index,
)
from moe_plugin.checkpoint.reshard import moe_layers
from moe_plugin.checkpoint.source import UNREADABLE, CheckpointError, Derived
from moe_plugin.comm.base import Comm, LocalComm
from moe_plugin.comm.group import advice
from moe_plugin.experts import Experts
from moe_plugin.memory.experts.stored import stored_names, without_values
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import move_into_place, write_remedy
from moe_plugin.utils.tensors import is_sharded, sharded_as

logger = logging.getLogger(__name__)
# arguments: the checkpoint's shapes by name, and its `extra`
Leave = Callable[[Mapping[str, tuple[int, ...]], Mapping[str, Any]], Collection[str]]


def save(directory: str | os.PathLike[str], model: nn.Module,
         optimizer: torch.optim.Optimizer | None = None, comm: Comm | None = None,
         extra: Mapping[str, Any] | None = None, keep_old: bool = False) -> None:
    """Write a checkpoint. All ranks of `comm` must call this function.

    If the process is killed during saving, either the old or the new checkpoint is intact.

    Args:
        model: model of a plain training loop, without a DDP wrapper. FSDP2 is supported.
        optimizer: optimizer to save. Optional.
        comm: expert-parallel group. Defaults to the group of the model's `MoELayer`s.
        extra: JSON values, such as the step, that are equal on all ranks.
        keep_old: whether to keep the old checkpoint as `DIRECTORY.old`, a backup for `load`.
    Raises:
        CheckpointError: If a rank could not write or `extra` is not JSON. Raised on all ranks.
        ValueError: If the layers use several groups and `comm` is not given, or if experts with
            adapters are divided among several ranks.
    """
    comm = comm or _group_of(model)
    _refuse_adapters(model, comm)
    target = Path(directory)
    scratch = target.with_name(target.name + ".writing")
    try:
        _save(scratch, target, model, optimizer, comm, extra or {}, keep_old)
    except CheckpointError:  # raised on all ranks, so no rank is still writing
        if comm.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def _save(scratch: Path, target: Path, model: nn.Module,
          optimizer: torch.optim.Optimizer | None, comm: Comm, extra: Mapping[str, Any],
          keep_old: bool) -> None:
    with _on_all_ranks(comm, target):
        _check_extra(extra)
        if comm.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
    with _on_all_ranks(comm, target):
        model_state = model.state_dict()
        _check_group(model_state, comm)
        state = {"model": whole(model_state, comm),
                 "optimizer": whole(_optimizer_state(model, optimizer), comm)}
        checksums.write_sealed(scratch / part_name(comm.rank, comm.size),
                               lambda stream: torch.save(state, stream))
    with _on_all_ranks(comm, target):
        if comm.rank == 0:
            write_index(scratch, comm.size, extra)
            move_into_place(scratch, target, keep_old)


def _check_extra(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"extra[{name!r}] is a {type(value).__name__}, which JSON cannot represent "
                f"({error}): extra may contain numbers and text, in lists and dicts; "
                "use tensor.tolist(), or register tensors as buffers of the model") from error


def _group_of(model: nn.Module) -> Comm:
    """Return the group of the model's layers. Each rank of this group writes its own file."""
    from moe_plugin.layer import layers_in  # slow to import, so only imported if there is a model

    groups = {layer.comm.name: layer.comm for layer in layers_in(model)}
    if len(groups) > 1:
        raise ValueError(f"the model's layers use the groups {', '.join(sorted(groups))}, but must "
                         "share one group; pass `comm`, the ranks that write or read the "
                         "checkpoint together")
    return next(iter(groups.values()), LocalComm())


def _refuse_adapters(model: nn.Module, comm: Comm) -> None:
    """Raise `ValueError` if experts with adapters, which cannot be joined, are on several ranks."""
    from moe_plugin.layer import named_layers_in

    for name, layer in named_layers_in(model).items():
        # also refuses an adapter around another layer
        if comm.size > 1 and not isinstance(layer.experts, Experts):
            raise ValueError(
                f"{type(layer.experts).__name__} replaces the experts of layer {name!r}, which are "
                f"spread over {comm.size} ranks: merge the adapters into the experts "
                "(peft: merge_and_unload()), or save them on every rank in a separate folder "
                "(peft: save_pretrained)")


def _check_group(state: Mapping[str, Any], comm: Comm) -> None:
    """Raise `ValueError` unless the ranks that write are those among which experts are divided."""
    for prefix, origin in moe_layers(state).items():
        if origin["ep_size"] != comm.size:
            raise ValueError(
                f"the experts of layer {prefix!r} are spread over {origin['ep_size']} ranks, but "
                f"{comm.size} ranks write the checkpoint; pass the layers' group as `comm` (with "
                "FSDP2, an expert group must contain all of its ranks; with ddp_model, any group "
                "works)")


@contextmanager
def _on_all_ranks(comm: Comm, target: Path) -> Iterator[None]:
    """Raise an error on all ranks, which names the failed ranks, if the block fails on any rank."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # any error, because the other ranks must be informed
        error = caught
    with advice("another rank may still be writing its part; raise comm.timeout_s for slow disks"):
        bad = comm.agree_max([float(error is not None and rank == comm.rank)
                              for rank in range(comm.size)])
    failed = [rank for rank, is_bad in enumerate(bad) if is_bad]
    if error is not None:
        # a ValueError of this package already names its remedy
        remedy = "" if isinstance(error, ValueError) else f"; {write_remedy(error, target.parent)}"
        raise CheckpointError(
            f"checkpoint {str(target)!r}: rank {comm.rank} could not write its part: "
            f"{type(error).__name__}: {error}; an older checkpoint there is unchanged{remedy}"
        ) from error
    if failed:
        raise CheckpointError(
            f"checkpoint {str(target)!r} was not written, because of an error on rank(s) "
            f"{', '.join(map(str, failed))}; see the logs of these ranks")


def load(directory: str | os.PathLike[str], model: nn.Module,
         optimizer: torch.optim.Optimizer | None = None, comm: Comm | None = None,
         leave: Leave | None = None) -> dict[str, Any]:
    """Load a checkpoint into this rank's model and optimizer. If reading fails, no tensor changes.

    Any number of ranks may have written the checkpoint. All ranks of `comm` (see `save`) must call
    this function. Each rank verifies some of the files and reads only the tensors that it stores.

    Args:
        leave: function that returns the names of model tensors that must not be loaded. Not
            supported with an optimizer. Optional.
    Returns: the values that were passed to `save` as `extra`.
    Raises:
        CheckpointError: If the checkpoint is missing, truncated, or from another model.
        ValueError: If both `optimizer` and `leave` are given, or for the reasons listed in `save`.
    """
    if leave is not None and optimizer is not None:
        raise ValueError("leave cannot be combined with an optimizer, because the saved optimizer "
                         "state covers all saved tensors; pass only one of the two")
    comm = comm or _group_of(model)
    folder, index = _whole_folder(Path(directory), comm)
    with _refuse_other_values(folder), checksums.verified(
            folder / part_name(rank, index["parts"]) for rank in range(index["parts"])):
        source, on_disk = open_folder(folder), stored_names(model)
        with without_values(model):
            own = model.state_dict()
        mine = moe_layers(own)
        _check_layers(source.layers, mine)
        shards = {prefix: origin["shards"] for prefix, origin in mine.items() if "shards" in origin}
        part = part_of_rank(source, comm.rank, comm.size, shards)
        stay: Collection[str] = () if leave is None else leave(
            {name: value.entry.shape for name, value in part["model"].items()
             if isinstance(value, Derived)}, index["extra"])
        part["model"], own, kept = (
            {name: value for name, value in state.items() if (name in stay) == chosen}
            for state, chosen in ((part["model"], False), (own, False), (own, True)))
        _check_tensors(part["model"], own)
        if optimizer is not None:
            _check_optimizer(part["optimizer"], model, optimizer)
            _load_optimizer(torch_files.read_all(part["optimizer"]), model, optimizer)
        # experts in a file are read one at a time, while they are copied to it
        model.load_state_dict({**kept, **{name: value if name in on_disk
                                          else as_stored(torch_files.read_all(value), own[name])
                                          for name, value in part["model"].items()}})
    return index["extra"]


@contextmanager
def _refuse_other_values(source: Path) -> Iterator[None]:
    """Raise `CheckpointError` for errors caused by types or shapes that `save` never writes."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"checkpoint {str(source)!r}: {short(error, 500)}") from error
    except UNREADABLE as error:
        raise CheckpointError(
            f"checkpoint {str(source)!r} contains data that save() does not write "
            f"({type(error).__name__}: {short(error)}); use another checkpoint") from error


def _whole_folder(target: Path, comm: Comm) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the index of the checkpoint that all ranks load.

    If the checkpoint is missing or damaged, the older checkpoint in `DIRECTORY.old` is used.
    """
    old = target.with_name(target.name + ".old")
    [older, found] = comm.agree_max([float(old.exists()), float(target.exists())])
    if not older:
        return target, _verify(target, comm)
    if not found:
        return old, _verify(old, comm)
    try:
        return target, _verify(target, comm)
    except CheckpointError as error:
        index = _verify(old, comm)
        logger.warning("%s; the older checkpoint in %s is loaded instead", error, old)
        return old, index


def _verify(source: Path, comm: Comm) -> dict[str, Any]:
    """Verify each file on one rank, and return the index. If a file is damaged, all ranks fail."""
    error, sealed = None, True
    try:
        index, sealed = read_index(source)
        for rank in range(comm.rank, index["parts"], comm.size):
            sealed = check_part(source, index, rank) and sealed
    except CheckpointError as caught:
        error = caught
    [failed, unsealed] = comm.agree_max([float(error is not None), float(not sealed)])
    if failed:
        raise error or CheckpointError(
            f"checkpoint {str(source)!r} is damaged; the log of another rank names the file")
    if unsealed and comm.rank == 0:
        logger.warning("checkpoint %s was written without checksums, so damage may go undetected; "
                       "the next save adds checksums", source)
    return index


def _check_layers(theirs: Mapping[str, Mapping[str, int]],
                  model_layers: Mapping[str, Mapping[str, int]]) -> None:
    for prefix, origin in model_layers.items():
        if prefix not in theirs:
            raise ValueError(f"the checkpoint has no MoE layer {prefix!r}; its MoE layers: "
                             f"{', '.join(theirs) or 'none'}{_of_wrappers(prefix, theirs)}")
        if theirs[prefix]["num_experts"] != origin["num_experts"]:
            raise ValueError(
                f"the checkpoint has num_experts={theirs[prefix]['num_experts']} in layer "
                f"{prefix!r}, but the model has {origin['num_experts']}; build the model with the "
                "number in the checkpoint")


def _of_wrappers(prefix: str, theirs: Collection[str]) -> str:
    """Return advice for when only the checkpoint or only the model has a wrapper such as DDP."""
    for start, inner in (("module.", "model.module"), ("_orig_mod.", "model._orig_mod")):
        if prefix.startswith(start) and prefix.removeprefix(start) in theirs:
            return f"; the model is in a wrapper: pass {inner}"
        if f"{start}{prefix}" in theirs:
            return (f"; the checkpoint was saved from a wrapped model: save {inner}, or load this "
                    "checkpoint into a model in the same wrapper")
    return ""


def _check_tensors(state: Mapping[str, Any], model_state: Mapping[str, Any]) -> None:
    for key in [*model_state, *state]:
        if key not in state or key not in model_state:
            where = "checkpoint" if key not in state else "model"
            raise ValueError(f"{key!r} is missing in the {where}; use a checkpoint of this model")
        theirs = state[key]
        shape = theirs.entry.shape if isinstance(theirs, Derived) else type(theirs).__name__
        if isinstance(model_state[key], Tensor) and shape != tuple(model_state[key].shape):
            raise ValueError(f"{key!r} has shape {shape} in the checkpoint, but shape "
                             f"{tuple(model_state[key].shape)} in the model; build the same model")


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        by_id[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
    ]


def _optimizer_state(model: nn.Module,
                     optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    state, names = optimizer.state_dict(), _names(model, optimizer)
    return {
        "by_name": {names[index]: values for index, values in state["state"].items()},
        "groups": [{key: value for key, value in group.items() if key != "params"}
                   for group in state["param_groups"]]
    }


def _check_optimizer(state: dict[str, Any] | None, model: nn.Module,
                     optimizer: torch.optim.Optimizer) -> None:
    if state is None:
        raise ValueError("the checkpoint has no optimizer state; load it without an optimizer")
    if len(state["groups"]) != len(optimizer.param_groups):
        raise ValueError(f"the checkpoint has {len(state['groups'])} optimizer groups, but this "
                         f"optimizer has {len(optimizer.param_groups)}; build the optimizer that "
                         "was saved")
    _check_kind(state, optimizer)
    if unknown := sorted(set(state["by_name"]) - set(_names(model, optimizer))):
        raise ValueError(f"the checkpoint has optimizer state for {unknown[0]!r}, which this "
                         "optimizer does not train; build the optimizer that was saved")


def _check_kind(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` if the optimizer state belongs to a different optimizer class.

    Newer versions of torch add flags to optimizers, and schedulers add settings. Two classes are
    therefore considered different only if each has a setting (not a flag) that the other lacks.
    """
    numbers = {name for name, value in optimizer.defaults.items()
               if value is not None and not isinstance(value, bool)}
    for saved, group in zip(state["groups"], optimizer.param_groups, strict=True):
        theirs = sorted(set(saved) - set(group))
        ours = sorted(numbers - set(saved))
        if theirs and ours:
            held = sorted({key for values in state["by_name"].values() for key in values})
            own = sorted({key for values in optimizer.state.values() for key in values})
            raise ValueError(
                f"the checkpoint belongs to another optimizer: it has {', '.join(theirs)} with the "
                f"state {', '.join(held) or '(empty)'}, and this {type(optimizer).__name__} has "
                f"{', '.join(ours)}{' with the state ' + ', '.join(own) if own else ''}; build the "
                "optimizer that was saved, or load the model without an optimizer")


def _load_optimizer(state: dict[str, Any], model: nn.Module,
                    optimizer: torch.optim.Optimizer) -> None:
    names = _names(model, optimizer)
    groups, start = [], 0
    for saved, group in zip(state["groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, "params": list(range(start, start + len(group["params"])))})
        start += len(group["params"])
    own = dict(model.named_parameters())
    by_index = {
        index: {key: as_stored(value, own[name]) for key, value in state["by_name"][name].items()}
        for index, name in enumerate(names) if name in state["by_name"]
    }
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def whole(state: Any, comm: Comm) -> Any:
    """Gather all sharded tensors in a state dict into full tensors. Collective over their ranks.

    Args:
        state: nested mappings. Sharded tensors must have the same order on all ranks.
        comm: the ranks that write the checkpoint.
    Raises:
        ValueError: If a tensor is sharded over other ranks than those of `comm`.
    """
    if isinstance(state, Mapping):
        return {key: whole(value, comm) for key, value in state.items()}
    if not is_sharded(state):
        return state
    ranks = state.device_mesh.size()
    if ranks != comm.size:
        raise ValueError(
            f"parameters are sharded over {ranks} ranks and the checkpoint is written by "
            f"{comm.size}, but both must be the ranks that share the experts; "
            "keep whole parameters on every rank (ddp_model), or spread the experts over all ranks")
    return state.full_tensor().cpu()  # avoids a copy of the whole model on the device


def as_stored(value: Any, target: Any) -> Any:
    """Shard a full tensor like the tensor `target`. Return all other values unchanged."""
    if is_sharded(target) and isinstance(value, Tensor) and value.shape == target.shape:
        return sharded_as(value, target)
    return value
