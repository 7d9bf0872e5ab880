"""The format of fairseq checkpoints for models with this package's layers. A checkpoint is a single
file, or one file for each data-parallel rank.

A single process writes `checkpoint_last.pt`, and several processes write
`checkpoint_last-rank-N.pt`. A source contains the weights of the model and of the criterion, the
optimizer state by parameter name, and the averaged weights. All other entries of the files
(settings, training history, iterator, meters) are read from the file of rank 0.
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
    """The checkpoint files of one training step.

    Attributes:
        world: number of ranks that wrote the step.
        ep: number of ranks that together store one copy of the experts.
        experts: number of experts in each MoE layer, or 0 for a dense model.
        step: number of optimizer steps, or -1 if the files do not state this number.
        paths: paths of the files of ranks 0 to `ep - 1`.
    """

    world: int
    ep: int
    experts: int
    step: int
    paths: tuple[str, ...]


def read_file(path: str, trusted: bool = False) -> dict[str, Any]:
    """Read a checkpoint file without reading the values of tensors. The checksum of the file is not
    verified.

    Raises:
        CheckpointError: If the file is truncated, damaged or not a checkpoint of fairseq.
    """
    return torch_files.open_mapping(Path(path), "use another checkpoint", files.ALLOWED, trusted,
                                    _check_content)


def _check_content(state: Mapping[str, Any]) -> None:
    if not isinstance(state.get(MODEL), dict) or not all(
            isinstance(name, str) for name in state[MODEL]):
        raise ValueError("it does not contain a model")
    files.check_manifest(state)


def _refuse_shard(path: str, state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a file was saved with `--use-sharded-state`, because it then
    contains only a shard of each tensor.
    """
    if any("flat_param" in name for name in state[MODEL]):
        raise CheckpointError(
            f"checkpoint {path!r} contains only one rank's shard of every parameter (--ddp-backend "
            "fully_sharded --use-sharded-state), which cannot be converted; resume the run without "
            "--use-sharded-state and save a whole checkpoint")


def survey(name: str, trusted: bool = False, left_out: list[str] | None = None) -> list[Written]:
    """Find the training steps with complete checkpoints among the files `NAME.pt` and
    `NAME-rank-N.pt`. The steps are sorted, with the newest step first.

    A step is also included if saving was interrupted during the final renaming of its files.

    left_out: list to which a message is appended for each unreadable file. The message contains the
        path and the reason. Optional.
    """
    whole = files.without_rank(name)
    paths_by_step: dict[tuple[int, int, int, int], dict[int, str]] = {}
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
        of_step = paths_by_step.setdefault(key, {})
        if manifest["rank"] not in of_step or not path.endswith(files.PENDING):
            of_step[manifest["rank"]] = path
    return [Written(world, ep, experts, step, tuple(paths[rank] for rank in range(ep)))
            for (step, world, ep, experts), paths in sorted(paths_by_step.items(), reverse=True)
            if all(rank in paths for rank in range(ep))]


def _manifest(state: Mapping[str, Any]) -> Mapping[str, Any]:
    dense = {"num_experts": 0, "world_size": 1, "expert_parallel_size": 1, "rank": 0,
             "num_updates": -1}
    return state.get(files.MANIFEST) or dense


def open_written(written: Written, trusted: bool = False) -> Source:
    """Open the files of one step as a source.

    Raises:
        CheckpointError: If a file is damaged, or if it contains only a shard of each parameter.
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
        description["optimizer_state"] = "without names: usable only with its own number of ranks"
        values[GROUPS] = None
    with refused_if_unreadable(
            f"checkpoint {written.paths[0]!r}: the files of its ranks do not fit together",
            "use another checkpoint"):
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
    """Return the contents of the file of data-parallel rank `rank`. This function does not read the
    values of tensors.

    The position in the epoch is converted to the new number of ranks. The new position corresponds
    to the same total number of batches, rounded down.

    Args:
        source: a source of this format.
        rank: data-parallel rank.
        world: number of data-parallel ranks.
        ep: number of expert-parallel ranks, which must be a divisor of `world`.
        shards: number of ranks among which each expert is split. Optional.
    Raises:
        CheckpointError: If the source has optimizer state without parameter names.
        ValueError: If the experts cannot be divided among the ranks.
    """
    if STATE not in source.values:
        raise CheckpointError(
            f"the {source.format} checkpoint has no fairseq settings or training history, so it "
            "cannot be converted to fairseq; only fairseq checkpoints can")
    columns = columns_of_rank(source, rank % ep, ep, shards)
    rest, old = source.values[STATE], source.describe().get("ranks", 1)
    if source.values.get(MODEL_ONLY):
        rest = {key: value for key, value in rest.items() if key != OPTIMIZER}
    order = source.values.get(PARAMETERS) or []
    if rest.get(OPTIMIZER) and not order:
        raise CheckpointError(
            "the checkpoint has optimizer state without parameter names, so the state cannot be "
            "distributed to the new files; use --model-only, or resume with --reset-optimizer")
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
        raise ValueError("a model without experts is stored in a single file, so --world must be "
                         f"1, not {world}")
    return state


def state_by_index(columns: Mapping[str, Mapping[str, Any]],
                   order: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Return the state of an optimizer, keyed by parameter index. `order` lists the parameter names
    in the order of the indices.
    """
    state: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(order):
        values = {field: column[name] for field, column in columns.items() if name in column}
        if values:
            state[index] = values
    return state


def _moved(extra: Mapping[str, Any], old: int, new: int) -> dict[str, Any]:
    """Return fairseq's `extra_state`, in which the position in the epoch is converted to a
    different number of ranks.
    """
    iterator = extra.get("train_iterator")
    if not isinstance(iterator, Mapping) or "iterations_in_epoch" not in iterator:
        return dict(extra)
    position = iterator["iterations_in_epoch"] * old // new
    return {**extra, "train_iterator": {**iterator, "iterations_in_epoch": position}}


@formats.register("fairseq")
class FairseqFormat(Format):
    """Checkpoints of fairseq models with this package's layers (a single file or one file per
    rank), and of dense fairseq models.
    """

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
                                  "use its folder, or NAME.pt for NAME-rank-N.pt")
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
    """Return the total number of ranks and the number of expert-parallel ranks for a layout."""
    ranks, groups = (source.describe().get(name, 1) for name in ("ranks", "ep"))
    world = layout.world or layout.ep or ranks
    ep = layout.ep or (groups if world == ranks else world)
    if world % ep:
        raise ValueError(f"--ep {ep} does not divide --world {world}; choose a divisor of {world} "
                         "for --ep")
    return world, ep


def _written(path: Path, trusted: bool = False) -> Written | None:
    """Return the newest step stored at a path (in a folder: in the files `checkpoint_last*.pt`)."""
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
