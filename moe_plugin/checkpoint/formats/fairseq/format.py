"""Our fairseq checkpoints as a format: one file, or one for each data-parallel rank.

`checkpoint_last.pt` of one process, `checkpoint_last-rank-N.pt` of several. Tensors are the model's
and the criterion's, optimizer state by parameter name, and averaged weights; everything else in the
files (settings, histories, iterator, meters) is rank 0's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from moe_plugin.checkpoint.formats.fairseq import files, neutral
from moe_plugin.checkpoint.formats.fairseq.entries import (
    AVERAGES,
    CRITERION,
    OPTIMIZER,
    PARAMETERS,
    STATE,
    by_parameter,
    names_by_order,
)
from moe_plugin.checkpoint.neutral import NEUTRAL
from moe_plugin.checkpoint.reshard import (
    GROUPS,
    bytes_of_ranks,
    columns_of_rank,
    moe_layers,
    ranked_source,
    sizes_of,
)
from moe_plugin.checkpoint.source import (
    MODEL,
    MODEL_ONLY,
    CheckpointError,
    Source,
    refused_if_unreadable,
)
from moe_plugin.experts.base import current_name


@dataclass(frozen=True)
class Written:
    """The files of one step.

    Attributes:
        world, ep: ranks that wrote it; those that share one copy of the experts.
        experts: in each MoE layer; 0 in a dense model.
        step: number of updates; -1 where the files do not say it.
        paths: files of ranks 0 to ep - 1.
    """

    world: int
    ep: int
    experts: int
    step: int
    paths: tuple[str, ...]


def read_file(path: str, trusted: bool = False) -> dict[str, Any]:
    """A file whose tensors stay on disk; its checksum is not verified.

    Raises:
        CheckpointError: it is truncated, damaged or no checkpoint of fairseq.
    """
    return torch_files.open_mapping(Path(path), "give another one", files.ALLOWED, trusted,
                                    _check_content)


def _check_content(state: Mapping[str, Any]) -> None:
    if not isinstance(state.get(MODEL), dict) or not all(
            isinstance(name, str) for name in state[MODEL]):
        raise ValueError("it has no model")
    files.check_manifest(state)


def _refuse_shard(path: str, state: Mapping[str, Any]) -> None:
    """A file of `--use-sharded-state` has a part of each tensor, under a name of fairscale's."""
    if any("flat_param" in name for name in state[MODEL]):
        raise CheckpointError(
            f"checkpoint {path!r} has one rank's part of every parameter (--ddp-backend "
            "fully_sharded --use-sharded-state), which is not read; resume the run without "
            "--use-sharded-state and save a whole checkpoint")


def survey(name: str, trusted: bool = False, left_out: list[str] | None = None) -> list[Written]:
    """The complete steps in the files of `NAME.pt` and `NAME-rank-N.pt`, newest first; also those
    whose last phase of saving was interrupted.

    left_out: optional. Receives an error's text, with file and reason, for each file that cannot be
        read, and is therefore left out.
    """
    whole = files.without_rank(name)
    found: dict[tuple[int, int, int, int], dict[int, str]] = {}
    for path in (whole, whole + files.PENDING, *files.rank_files(whole).values(),
                 *files.rank_files(whole, files.PENDING).values()):
        if not os.path.isfile(path):
            continue
        try:
            manifest = _manifest(read_file(path, trusted))
        except CheckpointError as error:
            if left_out is not None:
                left_out.append(str(error))
            continue
        key = tuple(manifest[name] for name in ("num_updates", "world_size",
                                                "expert_parallel_size", "num_experts"))
        of_step = found.setdefault(key, {})
        if manifest["rank"] not in of_step or not path.endswith(files.PENDING):
            of_step[manifest["rank"]] = path
    return [Written(world, ep, experts, step, tuple(paths[rank] for rank in range(ep)))
            for (step, world, ep, experts), paths in sorted(found.items(), reverse=True)
            if all(rank in paths for rank in range(ep))]


def _manifest(state: Mapping[str, Any]) -> Mapping[str, Any]:
    dense = {"num_experts": 0, "world_size": 1, "expert_parallel_size": 1, "rank": 0,
             "num_updates": -1}
    return state.get(files.MANIFEST) or dense


def open_written(written: Written, trusted: bool = False) -> Source:
    """The files of one step as a source.

    Raises:
        CheckpointError: a file is damaged, or has a part of every parameter.
    """
    states = [by_parameter(read_file(path, trusted)) for path in written.paths]
    first = states[0]
    _refuse_shard(written.paths[0], first)
    rest = torch_files.read_all(_without_columns(first))
    optimizer = first.get(OPTIMIZER) or {}
    values = {"step": _step(first), "settings": first.get("cfg") or first.get("args"),
              STATE: rest, GROUPS: optimizer.get("param_groups"), PARAMETERS: _names(first)}
    description = {"ranks": written.world, **sizes_of(moe_layers(first[MODEL])), "ep": written.ep}
    if not _names(first) and optimizer.get("state"):
        description["optimizer_state"] = "without names: it loads at its own number of ranks alone"
        values[GROUPS] = None
    with refused_if_unreadable(
            f"checkpoint {written.paths[0]!r}: its ranks' files do not fit together",
            "give another one"):
        return ranked_source("fairseq", [_columns(state) for state in states], values, description,
                             [Path(path) for path in written.paths])


def _step(state: Mapping[str, Any]) -> int | None:
    manifest, history = state.get(files.MANIFEST), state.get("optimizer_history") or [{}]
    return manifest["num_updates"] if manifest else history[-1].get("num_updates")


def _names(state: Mapping[str, Any]) -> list[str]:
    names = (state.get(files.MANIFEST) or {}).get(PARAMETERS) or names_by_order(state)
    return [current_name(name) for name in names]


def _columns(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    columns: dict[str, dict[str, Any]] = {MODEL: state[MODEL]}
    if state.get(CRITERION):
        columns[CRITERION] = state[CRITERION]
    extra, names = state.get("extra_state") or {}, _names(state)
    columns |= {field: extra[key] for key, field in AVERAGES.items() if key in extra}
    if names:
        for index, values in ((state.get(OPTIMIZER) or {}).get("state") or {}).items():
            for field, value in values.items():
                columns.setdefault(field, {})[names[index]] = value
    return columns


def _without_columns(state: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in state.items()
            if key != MODEL and not (key == CRITERION and value)}
    rest["extra_state"] = {key: value for key, value in (state.get("extra_state") or {}).items()
                           if key not in AVERAGES}
    if rest.get(OPTIMIZER):
        rest[OPTIMIZER] = {key: value for key, value in rest[OPTIMIZER].items() if key != "state"}
    return rest


def state_of_rank(source: Source, rank: int, world: int, ep: int,
                  shards: int | Mapping[str, int] | None = None) -> dict[str, Any]:
    """What rank `rank` of `world` data-parallel ranks stores of a source of this format, tensors
    on disk.

    The position in the epoch is that of the same number of batches in total, rounded down.

    Args:
        ep: expert-parallel ranks; `world` is a multiple.
    Raises:
        CheckpointError: the source has optimizer state without the parameters' names.
        ValueError: the experts do not fit.
    """
    if STATE not in source.values:
        raise CheckpointError(
            f"the {source.format} checkpoint has no settings and histories of fairseq: only "
            "checkpoints of fairseq become ones")
    columns = columns_of_rank(source, rank % ep, ep, shards)
    rest, old = source.values[STATE], source.describe().get("ranks", 1)
    if source.values.get(MODEL_ONLY):
        rest = {key: value for key, value in rest.items() if key != OPTIMIZER}
    order = source.values.get(PARAMETERS) or []
    if rest.get(OPTIMIZER) and not order:
        raise CheckpointError(
            "the checkpoint has optimizer state without the names of its parameters, so that it "
            "is kept for no other file; give --model-only, or resume with --reset-optimizer")
    state = {**rest, MODEL: columns.pop(MODEL)}
    if CRITERION in columns:
        state[CRITERION] = columns.pop(CRITERION)
    averages = {key: columns.pop(field) for key, field in AVERAGES.items() if field in columns}
    state["extra_state"] = _moved(rest["extra_state"], old, world) | averages
    if rest.get(OPTIMIZER) is not None:
        state[OPTIMIZER] = {**rest[OPTIMIZER], "state": state_by_index(columns, order)}
    if source.layers:
        state[files.MANIFEST] = {
            **_manifest(rest), "version": files.VERSION, "world_size": world, "rank": rank,
            "expert_parallel_size": ep, "num_updates": source.values["step"], PARAMETERS: order}
    elif world > 1:
        raise ValueError(f"a model without experts has one file; --world {world} must be 1")
    return state


def state_by_index(columns: Mapping[str, Mapping[str, Any]],
                   order: Sequence[str]) -> dict[int, dict[str, Any]]:
    """An optimizer's state by the number of a parameter in `order`."""
    state: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(order):
        found = {field: column[name] for field, column in columns.items() if name in column}
        if found:
            state[index] = found
    return state


def _moved(extra: Mapping[str, Any], old: int, new: int) -> dict[str, Any]:
    """fairseq's `extra_state` with the position in the epoch of another number of ranks."""
    iterator = extra.get("train_iterator")
    if not isinstance(iterator, Mapping) or "iterations_in_epoch" not in iterator:
        return dict(extra)
    position = iterator["iterations_in_epoch"] * old // new
    return {**extra, "train_iterator": {**iterator, "iterations_in_epoch": position}}


@formats.register("fairseq")
class FairseqFormat(Format):
    """Checkpoints of fairseq with our layers, of one process or of every rank, and dense ones."""

    name = "fairseq"
    views_as = {NEUTRAL: neutral.to_neutral}
    views_of = {NEUTRAL: neutral.from_neutral}
    becomes = ("fairseq_branch",)
    sizes = frozenset({"world", "ep", "shards"})

    def detect(self, path: Path, trust: bool = False) -> bool:
        return bool(_written(path, trust))

    def open(self, path: Path, trust: bool = False) -> Source:
        written = _written(path, trust)
        if written is None:
            raise CheckpointError(f"there is no complete checkpoint of fairseq at {str(path)!r}: "
                                  "give its folder, or NAME.pt for NAME-rank-N.pt")
        return open_written(written, trust)

    def write(self, source: Source, path: Path, layout: CheckpointSizes,
              progress: WriteProgress = WriteProgress()) -> None:
        world, ep = _sizes(source, layout)
        write_files(path, {
            "checkpoint_last.pt" if world == 1 else f"checkpoint_last-rank-{rank}.pt":
            partial(state_of_rank, source, rank, world, ep, layout.shards)
            for rank in range(world)}, progress)

    def nbytes(self, source: Source, layout: CheckpointSizes) -> int:
        return bytes_of_ranks(source, *_sizes(source, layout))


def _sizes(source: Source, layout: CheckpointSizes) -> tuple[int, int]:
    """Ranks in total and expert-parallel ranks of a layout."""
    ranks, groups = (source.describe().get(name, 1) for name in ("ranks", "ep"))
    world = layout.world or layout.ep or ranks
    ep = layout.ep or (groups if world == ranks else world)
    if world % ep:
        raise ValueError(f"--ep {ep} does not divide --world {world}; must be a divisor")
    return world, ep


def _written(path: Path, trusted: bool = False) -> Written | None:
    """The checkpoint at a path: in a folder, `checkpoint_last.pt`; the newest step of it."""
    name = str(path / "checkpoint_last.pt" if path.is_dir() else path)
    if not name.endswith(".pt"):
        return None
    left_out: list[str] = []
    for written in survey(name, trusted, left_out):
        state = read_file(written.paths[0], trusted)
        branch = files.MANIFEST not in state and files.of_branch(state)
        if not branch and ("args" in state or "cfg" in state):
            return written
    if left_out:
        raise CheckpointError("; ".join(left_out))
    return None
