"""Checkpoints of plain PyTorch training: a directory, written completely or not at all, read at any
number of ranks. Its files are described in `moe_plugin.checkpoint.formats.plain`.

Every file has a checksum (`moe_plugin.utils.checksums`), verified before anything is loaded.
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
from moe_plugin.utils.dtensors import is_sharded, sharded_as
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import move_into_place, write_remedy

logger = logging.getLogger(__name__)
# of shapes by name, as the checkpoint has them, and its `extra`
Leave = Callable[[Mapping[str, tuple[int, ...]], Mapping[str, Any]], Collection[str]]


def save(directory: str | os.PathLike[str], model: nn.Module,
         optimizer: torch.optim.Optimizer | None = None, comm: Comm | None = None,
         extra: Mapping[str, Any] | None = None, keep_old: bool = False) -> None:
    """Write a checkpoint; all ranks of `comm` call it.

    Everything is written next to the target and moved into place at the end, so that a killed run
    leaves either the old or the new checkpoint complete.

    Args:
        model: in a plain training loop, also in FSDP2; without the wrapper of DDP.
        comm: the expert-parallel group; None: that of the model's `MoELayer`s.
        extra: JSON values of the caller (step, seed, ...), equal on all ranks: checked before
            anything is written.
        keep_old: the checkpoint that was there stays as `DIRECTORY.old`, which `load` takes where
            this one is damaged later.
    Raises:
        CheckpointError: a rank could not write, or `extra` is not JSON; on every rank.
        ValueError: layers of several groups without `comm`; adapters of experts that are spread
            over ranks.
    """
    comm = comm or _group_of(model)
    _refuse_adapters(model, comm)
    target = Path(directory)
    scratch = target.with_name(target.name + ".writing")
    try:
        _save(scratch, target, model, optimizer, comm, extra or {}, keep_old)
    except CheckpointError:  # of all ranks, which write no more
        if comm.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def _save(scratch: Path, target: Path, model: nn.Module,
          optimizer: torch.optim.Optimizer | None, comm: Comm, extra: Mapping[str, Any],
          keep_old: bool) -> None:
    with _together(comm, target):
        _check_extra(extra)
        if comm.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
    with _together(comm, target):
        own = model.state_dict()
        _check_group(own, comm)
        state = {"model": whole(own, comm),
                 "optimizer": whole(_optimizer_state(model, optimizer), comm)}
        checksums.write_sealed(scratch / part_name(comm.rank, comm.size),
                               lambda stream: torch.save(state, stream))
    with _together(comm, target):
        if comm.rank == 0:
            write_index(scratch, comm.size, extra)
            move_into_place(scratch, target, keep_old)


def _check_extra(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"extra[{name!r}] is a {type(value).__name__} that JSON cannot hold ({error}): "
                "must be numbers and text, in lists and dicts; give tensor.tolist(), or register "
                "tensors as buffers of the model") from error


def _group_of(model: nn.Module) -> Comm:
    """Else each rank would write its own experts into the file of all."""
    from moe_plugin.layer import layers_in  # slow: only where there is a model

    groups = {layer.comm.name: layer.comm for layer in layers_in(model)}
    if len(groups) > 1:
        raise ValueError(f"the model's layers have the groups {', '.join(sorted(groups))}: must be "
                         "one; pass `comm`, the ranks that write or read the checkpoint together")
    return next(iter(groups.values()), LocalComm())


def _refuse_adapters(model: nn.Module, comm: Comm) -> None:
    """Their parameters join those of other ranks by no axis that they have in common."""
    from moe_plugin.layer import named_layers_in

    for name, layer in named_layers_in(model).items():
        if comm.size > 1 and not isinstance(layer.experts, Experts):  # not of another layer either
            raise ValueError(
                f"{type(layer.experts).__name__} stands in the place of the experts of layer "
                f"{name!r}, which are spread over {comm.size} ranks: must be merged into them "
                "(peft: merge_and_unload()), or saved by every rank in a folder of its own "
                "(peft: save_pretrained)")


def _check_group(state: Mapping[str, Any], comm: Comm) -> None:
    """Parts of other ranks than those that share the experts would not join."""
    for prefix, origin in moe_layers(state).items():
        if origin["ep_size"] != comm.size:
            raise ValueError(
                f"the experts of layer {prefix!r} are spread over {origin['ep_size']} ranks and "
                f"{comm.size} write the checkpoint: must be the same ranks; pass the layers' group "
                "as `comm` (in FSDP2: with expert groups of all its ranks; ddp_model has any)")


@contextmanager
def _together(comm: Comm, target: Path) -> Iterator[None]:
    """A step that ends alike on all ranks: a failure of one is an error on all that names it."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # of any kind: the other ranks must know
        error = caught
    with advice("a rank may still be writing its part: on a slow disk raise comm.timeout_s"):
        bad = comm.agree_max([float(error is not None and rank == comm.rank)
                              for rank in range(comm.size)])
    failed = [rank for rank, is_bad in enumerate(bad) if is_bad]
    if error is not None:
        # a ValueError of ours has its own remedy
        remedy = "" if isinstance(error, ValueError) else f"; {write_remedy(error, target.parent)}"
        raise CheckpointError(
            f"checkpoint {str(target)!r}: rank {comm.rank} could not write its part: "
            f"{type(error).__name__}: {error}; an older checkpoint there is untouched{remedy}"
        ) from error
    if failed:
        raise CheckpointError(
            f"checkpoint {str(target)!r}: not written, because of an error on rank(s) "
            f"{', '.join(map(str, failed))}; see their logs")


def load(directory: str | os.PathLike[str], model: nn.Module,
         optimizer: torch.optim.Optimizer | None = None, comm: Comm | None = None,
         leave: Leave | None = None) -> dict[str, Any]:
    """Read a checkpoint into this rank's model and optimizer; returns `extra`.

    Any number of ranks may have written it. All ranks of `comm` (as of `save`) call it: each
    verifies some of the files, and reads of all only what it stores.

    Nothing is changed unless everything could be read.

    Args:
        leave: which of the model's tensors stay as they are, such as a head of other classes; not
            with an optimizer, whose state is of the tensors that were saved. None: none.
    Raises:
        CheckpointError: missing, truncated, or of another model or expert count.
        ValueError: both an optimizer and `leave`, or see `save`.
    """
    if leave is not None and optimizer is not None:
        raise ValueError("leave with an optimizer: must be None, because the optimizer's state is "
                         "of the tensors that were saved; load one of the two")
    comm = comm or _group_of(model)
    folder, index = _whole_folder(Path(directory), comm)
    with _as_saved(folder), checksums.verified(
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
        # experts in a file are read one by one, as they are written there
        model.load_state_dict({**kept, **{name: value if name in on_disk
                                          else as_stored(torch_files.read_all(value), own[name])
                                          for name, value in part["model"].items()}})
    return index["extra"]


@contextmanager
def _as_saved(source: Path) -> Iterator[None]:
    """Values of other types or shapes than `save` writes are a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"checkpoint {str(source)!r}: {short(error, 500)}") from error
    except UNREADABLE as error:
        raise CheckpointError(
            f"checkpoint {str(source)!r} holds something else than save() writes "
            f"({type(error).__name__}: {short(error)}); use another checkpoint") from error


def _whole_folder(target: Path, comm: Comm) -> tuple[Path, dict[str, Any]]:
    """Folder and index of the checkpoint; of its predecessor where that was kept, or a save was
    killed before it removed it, and the checkpoint is missing or damaged. The same on all ranks.
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
        logger.warning("%s; the older one in %s is loaded", error, old)
        return old, index


def _verify(source: Path, comm: Comm) -> dict[str, Any]:
    """The index, after the ranks verified the parts, each some of them; an error on all ranks."""
    error, index, sealed = None, {}, True
    try:
        index, sealed = read_index(source)
        for rank in range(comm.rank, index["parts"], comm.size):
            sealed = check_part(source, index, rank) and sealed
    except CheckpointError as caught:
        error = caught
    [failed, unsealed] = comm.agree_max([float(error is not None), float(not sealed)])
    if failed:
        raise error or CheckpointError(
            f"checkpoint {str(source)!r} is damaged; the log of another rank says where")
    if unsealed and comm.rank == 0:
        logger.warning("checkpoint %s was written without checksums: damage may go unnoticed; the "
                       "next save adds them", source)
    return index


def _check_layers(theirs: Mapping[str, Mapping[str, int]],
                  mine: Mapping[str, Mapping[str, int]]) -> None:
    for prefix, origin in mine.items():
        if prefix not in theirs:
            raise ValueError(f"it has no MoE layer {prefix!r}; it has "
                             f"{', '.join(theirs) or 'none'}{_of_wrappers(prefix, theirs)}")
        if theirs[prefix]["num_experts"] != origin["num_experts"]:
            raise ValueError(
                f"it has num_experts={theirs[prefix]['num_experts']} in layer {prefix!r}, the "
                f"model has {origin['num_experts']}; build the model with the checkpoint's number")


def _of_wrappers(prefix: str, theirs: Collection[str]) -> str:
    """What to do where either the checkpoint or the model is of a wrapper, such as DDP's."""
    for start, inner in (("module.", "model.module"), ("_orig_mod.", "model._orig_mod")):
        if prefix.startswith(start) and prefix.removeprefix(start) in theirs:
            return f"; the model is in a wrapper: give {inner}"
        if f"{start}{prefix}" in theirs:
            return (f"; the checkpoint was saved of a wrapper: save {inner}, or load this one into "
                    "a model in the same wrapper")
    return ""


def _check_tensors(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    for key in [*mine, *state]:
        if key not in state or key not in mine:
            where = "checkpoint" if key not in state else "model"
            raise ValueError(f"{key!r} is not in the {where}: the checkpoint is of another model")
        theirs = state[key]
        found = theirs.entry.shape if isinstance(theirs, Derived) else type(theirs).__name__
        if isinstance(mine[key], Tensor) and found != tuple(mine[key].shape):
            raise ValueError(f"{key!r} has shape {found} in the checkpoint, "
                             f"{tuple(mine[key].shape)} in the model")


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
        raise ValueError("it has no optimizer state; load it without an optimizer")
    if len(state["groups"]) != len(optimizer.param_groups):
        raise ValueError(f"it has {len(state['groups'])} optimizer groups, this optimizer has "
                         f"{len(optimizer.param_groups)}")
    _check_kind(state, optimizer)
    if unknown := sorted(set(state["by_name"]) - set(_names(model, optimizer))):
        raise ValueError(f"it has optimizer state for {unknown[0]!r}, which this optimizer does "
                         "not train")


def _check_kind(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """An optimizer of another class fails while it is loaded, or in its first step.

    Versions of torch add flags, and schedulers settings of their own; where the classes differ,
    each has settings that the other lacks, and not flags only.
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
                f"it is of another optimizer: it has {', '.join(theirs)} "
                f"with the state {', '.join(held) or 'of no field'}, and this "
                f"{type(optimizer).__name__} has {', '.join(ours)}"
                f"{' with the state ' + ', '.join(own) if own else ''}; build the optimizer that "
                "was saved, or load the model without an optimizer")


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
    """A state dict with whole tensors; collective over the ranks that share them.

    Args:
        state: nested mappings; its sharded tensors are in the same order on all ranks.
        comm: the ranks that write the checkpoint.
    Raises:
        ValueError: other ranks than these share a tensor.
    """
    if isinstance(state, Mapping):
        return {key: whole(value, comm) for key, value in state.items()}
    if not is_sharded(state):
        return state
    ranks = state.device_mesh.size()
    if ranks != comm.size:
        raise ValueError(
            f"parameters are sharded over {ranks} ranks and the checkpoint is written by "
            f"{comm.size}: must be the same ranks, and those that share the experts; keep the "
            "parameters on every rank (ddp_model), or spread the experts over all of them")
    return state.full_tensor().cpu()  # not the whole model on a device


def as_stored(value: Any, mine: Any) -> Any:
    """What `whole` made of a tensor, sharded like the one in its place; other values as they are.
    """
    if is_sharded(mine) and isinstance(value, Tensor) and value.shape == mine.shape:
        return sharded_as(value, mine)
    return value
