"""The checkpoint format of fairseq's `moe` branch. A checkpoint consists of `NAME-shared.pt` and
several files `NAME-rank-N.pt`.

The shared file contains everything but the experts. The file of each rank contains the experts of
this rank, numbered from 0, and their optimizer state. All files contain the settings and the
training history. If there are more ranks than experts, rank `N` stores expert `N % E`. In a source
of this format, tensors have the names of fairseq's `moe` branch, and experts are numbered from 0 to
`E-1`. Optimizer state is stored by parameter name. With `--ddp-backend fully_sharded`, fairscale
stores parts of the optimizer state without parameter names. From such a checkpoint, only the model
can be converted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moe_plugin.checkpoint import torch_files
from moe_plugin.checkpoint.formats.base import (
    CheckpointSizes,
    Format,
    WriteProgress,
    formats,
    write_files,
)
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.formats.fairseq.branch_names import (
    branch_order,
    expert_of,
    our_order,
    renumbered,
    to_branch,
    to_ours,
)
from moe_plugin.checkpoint.formats.fairseq.entries import OPTIMIZER as _OPTIMIZER
from moe_plugin.checkpoint.formats.fairseq.entries import PARAMETERS, trained_names
from moe_plugin.checkpoint.formats.fairseq.entries import STATE as _STATE
from moe_plugin.checkpoint.formats.fairseq.format import read_file, state_by_index
from moe_plugin.checkpoint.reshard import GROUPS, column_source, columns_of
from moe_plugin.checkpoint.source import MODEL, MODEL_ONLY, CheckpointError, Derived, Source, View

_GATE = "gate.wg.weight"
_SHARED = re.compile(r"-shared(?=\.pt$)")
State = Mapping[str, Any]


def _find(path: Path) -> list[str]:
    """Return the files of a checkpoint: the shared file, followed by the rank files in the order of
    the ranks.

    The argument `path` is the folder of the checkpoint, or the name of any of its files. If there
    is no such checkpoint, return an empty list.
    """
    name = str(path / "checkpoint_last.pt" if path.is_dir() else path)
    stem = _SHARED.sub("", files.without_rank(name)).removesuffix(".pt")
    shared = f"{stem}-shared.pt"
    if not os.path.isfile(shared):
        return []
    paths_by_rank = files.rank_files(f"{stem}.pt")
    if missing := sorted(set(range(max(1, len(paths_by_rank)))) - set(paths_by_rank)):
        raise CheckpointError(f"checkpoint file '{stem}-rank-{missing[0]}.pt', which contains "
                              f"experts, is missing next to {shared!r}; restore it")
    return [shared, *(paths_by_rank[rank] for rank in sorted(paths_by_rank))]


def _open(paths: Sequence[str], trusted: bool) -> Source:
    """Open the files of one checkpoint as a source whose tensors contain all experts."""
    shared, *ranks = (read_file(path, trusted) for path in paths)
    gates = {name: value.entry.shape[0] for name, value in shared[MODEL].items()
             if name.endswith("." + _GATE)}
    if len(set(gates.values())) != 1:
        raise CheckpointError(f"checkpoint {paths[0]!r} has MoE layers with different numbers of "
                              f"experts, {sorted(set(gates.values()))}; all MoE layers must have "
                              "the same number of experts")
    [count], local = set(gates.values()), _local_experts(ranks[0], paths[1])
    if (len(ranks) * local) % count or (local > 1 and len(ranks) * local != count):
        raise CheckpointError(
            f"checkpoint {paths[0]!r} has {count} experts, but its {len(ranks)} rank files have "
            f"{local} experts each: files are missing or belong to another checkpoint")
    steps = {_step(state) for state in (shared, *ranks)}
    if len(steps) != 1:
        raise CheckpointError(f"the files of checkpoint {paths[0]!r} were saved at different "
                              f"steps, {sorted(map(str, steps))}; use files that were saved at the "
                              "same step")
    parts, ep = [(shared, shared[MODEL], paths[0])], count // local
    for rank, state in enumerate(ranks[:ep]):
        places: dict[str, Any] = {name: expert_of(name) for name in state[MODEL]}
        numbered = {renumbered(name, rank * local + places[name][1]): value
                    for name, value in state[MODEL].items()}
        parts.append((state, numbered, paths[1 + rank]))
    unread = next(filter(None, (_why_unassignable(*part) for part in parts)), "")
    columns: dict[str, dict[str, Any]] = {}
    for state, model, _ in parts:
        for field, column in _columns(state, model, bool(unread)).items():
            columns.setdefault(field, {}).update(column)
    layers = {name.removesuffix(_GATE): {"num_experts": count} for name in gates}
    description = {"ranks": len(ranks), "ep": ep}
    if unread:
        description["optimizer_state"] = f"not converted: {unread}"
    return column_source("fairseq_branch", columns, layers, _values(shared, bool(unread)),
                         description, [Path(path) for path in paths])


def _local_experts(state: State, path: str) -> int:
    """Return the number of experts that a rank's file contains."""
    numbers = set()
    for name in state[MODEL]:
        expert = expert_of(name)
        if expert is None:
            raise CheckpointError(f"checkpoint file {path!r} contains {name!r}, which is not a "
                                  "parameter of an expert, so it is not a file of fairseq's moe "
                                  "branch")
        numbers.add(expert[1])
    if not numbers or numbers != set(range(len(numbers))):
        raise CheckpointError(f"checkpoint file {path!r} contains the experts {sorted(numbers)}, "
                              "but expert numbers must be 0, 1, 2, ... without gaps; copy the file "
                              "again")
    return len(numbers)


def _step(state: State) -> int | None:
    return (state.get("optimizer_history") or [{}])[-1].get("num_updates")


def _values(shared: State, unread: bool) -> dict[str, Any]:
    """Return all values of the checkpoint that are not tensors, for `Source.values`.

    unread: True if the optimizer state could not be assigned to parameters. If `unread` is True,
        writers require `--model-only`.
    """
    rest = {key: value for key, value in shared.items() if key not in (MODEL, _OPTIMIZER)}
    optimizer = shared.get(_OPTIMIZER)
    if unread:
        rest[_OPTIMIZER] = {"param_groups": []}
    elif optimizer:
        rest[_OPTIMIZER] = {key: value for key, value in optimizer.items() if key != "state"}
    averages = [key for key in ("ema", "ema_fp32_params") if key in (rest.get("extra_state") or {})]
    if averages:
        raise CheckpointError("the checkpoint of fairseq's moe branch contains averaged weights "
                              f"({averages[0]!r}), which cannot be converted; save it without "
                              "--store-ema")
    rest = torch_files.read_all(rest)
    return {"step": _step(shared), "settings": rest.get("cfg") or rest.get("args"), _STATE: rest,
            GROUPS: None if unread else (rest.get(_OPTIMIZER) or {}).get("param_groups")}


def _columns(state: State, model: State, model_only: bool) -> dict[str, dict[str, Any]]:
    """Return the model tensors and the optimizer state of one file. Both are returned as columns,
    that is, dicts with one value per parameter name.

    model: the file's model tensors, with global expert indices in their names.
    """
    columns: dict[str, dict[str, Any]] = {MODEL: dict(model)}
    found = {} if model_only else (state.get(_OPTIMIZER) or {}).get("state") or {}
    for (_, values), name in zip(sorted(found.items()), _trained(model, len(found)), strict=True):
        for field, value in values.items():
            columns.setdefault(field, {})[name] = value
    return columns


def _why_unassignable(state: State, model: State, path: str) -> str:
    """Return the reason why the optimizer state in a file cannot be assigned to parameters, or an
    empty string if it can be assigned.
    """
    optimizer = state.get(_OPTIMIZER) or {}
    # -1: fairscale's optimizer state is in another file
    if optimizer == -1 or "param_id_map" in optimizer:
        return f"the state in {path!r} consists of pieces of --ddp-backend fully_sharded"
    state_by_index = optimizer.get("state") or {}
    names = _trained(model, len(state_by_index))
    if len(names) != len(state_by_index):
        return (f"the state in {path!r} is of {len(state_by_index)} parameters, but its model has "
                f"{len(model)} tensors")
    for (_, values), name in zip(sorted(state_by_index.items()), names, strict=True):
        for field, value in values.items():
            if isinstance(value, Derived) and value.entry.shape and \
                    value.entry.shape != model[name].entry.shape:
                return (f"{field!r} in {path!r} has shape {value.entry.shape}, but its parameter "
                        f"{name!r} has shape {model[name].entry.shape}: the state is flat (fp16 "
                        "without --fp16-no-flatten-grads) or of another model")
    return ""


def _trained(model: State, count: int) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of the optimizer. If the model
    does not have exactly `count` parameters, return an empty list.
    """
    return trained_names(branch_order(model), model, count) if count else []


@formats.register("fairseq_branch")
class BranchFormat(Format):
    """Checkpoints of fairseq's `moe` branch, with one shared file and one expert file per rank."""

    name = "fairseq_branch"
    becomes = ("fairseq",)
    views_as = {"fairseq": lambda source: _with_our_entries(to_ours(source))}
    views_of = {"fairseq": to_branch}
    sizes = frozenset({"world", "ep"})

    def detect(self, path: Path, trust: bool = False) -> bool:
        try:
            paths = _find(path)
            return bool(paths) and files.MANIFEST not in read_file(paths[0], trust)
        except CheckpointError:
            return False

    def open(self, path: Path, trust: bool = False) -> Source:
        paths = _find(path)
        if not paths:
            raise CheckpointError("there is no checkpoint of fairseq's moe branch at "
                                  f"{str(path)!r}: use its folder, or NAME.pt for NAME-shared.pt")
        return _open(paths, trust)

    def write(self, source: Source, path: Path, layout: CheckpointSizes,
              progress: WriteProgress = WriteProgress()) -> None:
        """See `Format`. Rank files are written for only one copy of the experts."""
        experts = {origin["num_experts"] for origin in source.layers.values()}
        if _STATE not in source.values or len(experts) != 1:
            raise CheckpointError("only fairseq checkpoints with the same number of experts in all "
                                  "MoE layers can be converted to fairseq's moe branch")
        [count] = experts
        given = source.describe().get("ep", 1)
        size = layout.ep or layout.world or (given if isinstance(given, int) else 1)
        if count % size or (layout.world or size) != size:
            raise ValueError(f"--ep {size} is invalid for {count} experts: it must be a divisor of "
                             "the number of experts, and --world must be equal to --ep")
        if (source.values[_STATE].get(_OPTIMIZER) and source.values.get(GROUPS) is None
                and not source.values.get(MODEL_ONLY)):
            raise CheckpointError(
                "the checkpoint has optimizer state without parameter names, so the state cannot "
                "be distributed to the new files; use --model-only")
        write_files(path, {
            f"checkpoint_last-{'shared' if rank is None else f'rank-{rank}'}.pt":
            partial(_state_of_file, source, rank, count // size)
            for rank in (None, *range(size))}, progress)


def _state_of_file(source: Source, rank: int | None, local: int) -> dict[str, Any]:
    """Return the contents of one file, given a source with the branch's names.

    Args:
        source: a source whose tensors have the branch's names.
        rank: rank whose file is written, or None for the shared file.
        local: number of experts that each rank stores.
    """
    columns, state = columns_of(source), dict(source.values[_STATE])
    state.pop(files.MANIFEST, None)
    optimizer = state.pop(_OPTIMIZER, None)
    every = branch_order(columns[MODEL])
    own = {name: other for name in every if (other := _name_in_file(name, rank, local)) is not None}
    state[MODEL] = {other: columns[MODEL][name] for name, other in own.items()}
    if optimizer is None or source.values.get(MODEL_ONLY):
        return state
    # parameters are numbered as in one rank's model, and a file has only a part of them
    trained = _trained_in(columns)
    order = [name for name in every if name in trained and (
        expert_of(name) is None or _name_in_file(name, rank or 0, local) is not None)]
    by_index = state_by_index({field: column for field, column in columns.items()
                               if field != MODEL}, order)
    state[_OPTIMIZER] = {
        **optimizer,
        "param_groups": _one_group(optimizer.get("param_groups") or [], len(order)),
        "state": {index: values for index, values in by_index.items() if order[index] in own}}
    return state


def _name_in_file(name: str, rank: int | None, local: int) -> str | None:
    """Return the name of a parameter in the file of a rank or in the shared file, or None if this
    file does not contain the parameter.
    """
    expert = expert_of(name)
    if expert is None or rank is None:
        return name if expert is None and rank is None else None
    owner, index = divmod(expert[1], local)
    return renumbered(name, index) if owner == rank else None


def _trained_in(columns: Mapping[str, State]) -> set[str]:
    """Return the names of the parameters that have optimizer state."""
    return {name for field, column in columns.items() if field != MODEL for name in column}


def _one_group(groups: Sequence[State], count: int) -> list[dict[str, Any]]:
    """Return the parameter group of an optimizer, adapted to `count` parameters.

    Raises:
        CheckpointError: If there are several groups, because the group of each parameter is then
            unknown.
    """
    if len(groups) != 1:
        raise CheckpointError(f"the optimizer has {len(groups)} parameter groups, which cannot "
                              "be renumbered; use --model-only")
    return [{**groups[0], "params": list(range(count))}]


def _with_our_entries(view: View) -> View:
    """Add the non-tensor entries of fairseq checkpoints for models with this package's layers."""
    rest, trained = dict(view.values[_STATE]), _trained_in(columns_of(view))
    order = [name for name in our_order(view.origin) if name in trained]
    if _OPTIMIZER in rest and order:
        groups = _one_group(rest[_OPTIMIZER].get("param_groups") or [], len(order))
        rest[_OPTIMIZER] = {**rest[_OPTIMIZER], "param_groups": groups}
    experts = next(iter(view.layers.values()))["num_experts"]
    rest[files.MANIFEST] = {
        "version": files.VERSION, "num_experts": experts, "world_size": 1, "rank": 0,
        "expert_parallel_size": 1, "num_updates": view.values["step"] or 0, PARAMETERS: order}
    return View(view, map(view.tensor, view.entries), values={
        **view.values, _STATE: rest, "step": view.values["step"] or 0, PARAMETERS: order})
