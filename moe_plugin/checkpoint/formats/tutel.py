"""Tutel's checkpoint format. The `state_dict()` of each rank is stored in a separate file.
Alternatively, a single file contains all experts. Tutel's `tutel.checkpoint.gather` writes such a
file.

In the following table, W is the number of ranks, E the number of experts, M the width of a token,
and H the inner width of an expert. PREFIX is the name of the MoE layer, followed by a dot:

    PREFIX_num_global_experts         number E
    PREFIXgates.0.wg.weight           [E, M]; a cosine gate: .cosine_projector.weight [P, M], .bias
                                      [P], .sim_matrix [P, E], .temperature [1]
    PREFIXexperts.batched_fc1_w       [E/W, H, M]    y = act(x fc1_w^T + fc1_bias)
    PREFIXexperts.batched_fc1_bias    [E/W, H]
    PREFIXexperts.batched_fc2_w       [E/W, H, M]    y fc2_w + fc2_bias
    PREFIXexperts.batched_fc2_bias    [E/W, M]

If there are `s = W/E > 1` ranks per expert, rank `i * s + j` stores slice `j` of expert `i` along
the axis H. `batched_fc2_bias` is split along the axis M, and the last slices are padded. All other
entries of the state dict are the same in all files. The file names follow a pattern with `{rank}`
and optionally `{size}`, as in Tutel's tools. The files contain no optimizer state. Source: Tutel,
`experts/ffn.py`, `checkpoint/gather.py`, `checkpoint/scatter.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_plugin.checkpoint.derived import joined, part_of
from moe_plugin.checkpoint.formats.base import (
    CheckpointSizes,
    Format,
    WriteProgress,
    formats,
    write_files,
)
from moe_plugin.checkpoint.name_table import NameRule, NameTable, Others
from moe_plugin.checkpoint.reshard import COLUMNS, column_source
from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    Source,
    TensorEntry,
    View,
    Window,
    window_shape,
)
from moe_plugin.checkpoint.torch_files import open_mapping

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
COUNT = "_num_global_experts"
# within a layer: Tutel's name -> (our name, whether the last two axes are swapped)
NAMES: dict[str, tuple[str, bool]] = {
    "gates.0.wg.weight": ("router.weight_ED", False),
    "gates.0.cosine_projector.weight": ("router.project_PD", False),
    "gates.0.cosine_projector.bias": ("router.project_P", False),
    "gates.0.sim_matrix": ("router.direction_EP", True),
    "gates.0.temperature": ("router.temperature", False),
    "experts.batched_fc1_w": ("experts.w_in_LDF", True),
    "experts.batched_fc1_bias": ("experts.bias_in_LF", False),
    "experts.batched_fc2_w": ("experts.w_out_LFD", False),
    "experts.batched_fc2_bias": ("experts.bias_out_LD", False),
}


def rank_files(path: Path) -> list[Path]:
    """Return the files of all ranks, in rank order. The argument is a pattern, a folder or a single
    file.

    Raises:
        CheckpointError: If the file of a rank is missing, or if the files in a folder match more
            than one pattern.
    """
    pattern = str(path)
    if "{rank}" not in pattern:
        inside = [one for one in path.iterdir() if one.suffix in SUFFIXES and one.is_file()
                  ] if path.is_dir() else [path] if path.is_file() else []
        if len(inside) < 2:
            return inside
        pattern = _pattern_of(path, [one.name for one in inside])
    found = _matching(pattern) if pattern else {}
    missing = sorted(set(range(max(found, default=0))) - set(found))
    if missing:
        raise CheckpointError(f"checkpoint {str(path)!r} has a file of rank {max(found)} but no "
                              f"file of rank {missing[0]}; restore the missing file")
    return [found[rank] for rank in sorted(found)]


def _matching(pattern: str) -> dict[int, Path]:
    """Return all files that match a pattern, keyed by rank. If the files have several values of
    `{size}`, the value with the most files is used.
    """
    folder = Path(pattern.split("{")[0] + "_").parent
    escaped = re.escape(pattern).replace(r"\{rank\}", r"(?P<rank>\d+)")
    expression = re.compile(escaped.replace(r"\{size\}", r"(?P<size>\d+)"))
    sizes: dict[str, dict[int, Path]] = {}
    for path in folder.rglob("*"):
        match = expression.fullmatch(str(path))
        if match and path.is_file():
            size = match.groupdict().get("size") or ""
            sizes.setdefault(size, {})[int(match["rank"])] = path
    return max(sizes.values(), key=len, default={})


def _pattern_of(folder: Path, names: Sequence[str]) -> str:
    """Return the file name pattern that the files in a folder match, or an empty string if there is
    none.

    Raises:
        CheckpointError: If the files match more than one pattern.
    """
    found: dict[str, set[int]] = {}
    for name in names:
        parts = re.split(r"(\d+)", name)
        for at in range(1, len(parts), 2):
            pattern = "".join([*parts[:at], "{rank}", *parts[at + 1:]])
            found.setdefault(pattern, set()).add(int(parts[at]))
    whole = [pattern for pattern, ranks in found.items() if ranks == set(range(len(ranks)))]
    most = max((len(found[pattern]) for pattern in whole), default=0)
    best = [pattern for pattern in whole if len(found[pattern]) == most]
    if len(best) > 1:
        raise CheckpointError(f"folder {str(folder)!r} has files that match several patterns "
                              f"({', '.join(sorted(best)[:3])}); select one pattern, such as "
                              f"{folder}/{best[0]}")
    return str(folder / best[0]) if best else ""


def _open_file(path: Path, trusted: bool) -> dict[str, Any]:
    return open_mapping(path, "use another checkpoint", (), trusted, _check_names)


def _check_names(state: Mapping[Any, Any]) -> None:
    if not all(isinstance(name, str) for name in state):
        raise ValueError("it does not contain a state_dict()")


def _open_ranks(paths: Sequence[Path], trusted: bool) -> Source:
    """Open the files of all ranks as a source whose expert tensors contain all experts."""
    states = [_open_file(path, trusted) for path in paths]
    prefixes = {name.removesuffix(COUNT): int(_number(value))
                for name, value in states[0].items() if name.endswith(COUNT)}
    if not prefixes:
        raise CheckpointError(f"checkpoint file {str(paths[0])!r} has no MoE layer of Tutel (entry "
                              f"{COUNT}); save it with a version of Tutel from 2022 or later")
    whole = {name: value for name, value in states[0].items()
             if not (name.endswith(COUNT) and isinstance(value, Derived))}
    for name, value in whole.items():
        prefix = next((p for p in prefixes if name.startswith(p + "experts.")), None)
        if prefix is not None and isinstance(value, Derived):
            whole[name] = _joined(name, paths, states, prefixes[prefix])
    layers = {prefix: {"num_experts": count} for prefix, count in prefixes.items()}
    return column_source("tutel", {MODEL: whole}, layers, {"step": None}, {"ranks": len(paths)},
                         paths)


def _joined(name: str, paths: Sequence[Path], states: Sequence[Mapping[str, Any]],
            experts: int) -> Derived:
    """Join the slices of a tensor from all ranks into a tensor with all experts."""
    parts, size = [], len(states)
    for path, state in zip(paths, states, strict=True):
        if not isinstance(state.get(name), Derived):
            raise CheckpointError(f"checkpoint file {str(path)!r} has no tensor {name!r}; use "
                                  "files of the same checkpoint")
        parts.append(state[name])
    shards = max(1, size // experts)
    if parts[0].entry.shape[0] * size != experts * shards:
        raise CheckpointError(
            f"{name!r} has {parts[0].entry.shape[0]} experts in each of {size} files, but the "
            f"layer has {experts} experts: files are missing or belong to another checkpoint")
    runs = [joined(parts[at:at + shards], 1) for at in range(0, size, shards)]
    tensor = joined(runs, 0) if len(runs) > 1 else runs[0]
    if shards > 1 and name.endswith("batched_fc2_bias"):  # the last pieces are padded
        width = states[0][name.removesuffix("bias") + "w"].entry.shape[2]
        return part_of(tensor, (slice(0, experts), slice(0, width)))
    return tensor


def _number(value: Any) -> Any:
    return value.read(tuple(slice(0, size) for size in value.entry.shape)).item() if isinstance(
        value, Derived) else value


def to_plain(source: Source) -> View:
    """Return a view that converts Tutel's names to those of a model with this package's layers."""
    tensors = _table(source).neutral(map(source.tensor, source.entries), _keep_outside(
        source, "MoELayer has no counterpart for Tutel's tensor", NAMES))
    return View(source, tensors, format="plain", values={**source.values, "extra": {}})


def from_plain(source: Source) -> View:
    """Return a view that converts the names of this package's layers to Tutel's names."""
    if not source.layers:
        raise CheckpointError("the checkpoint has no MoELayer that could be converted to Tutel's "
                              "layer; choose another format with --to")
    tensors = _table(source).theirs(source, _keep_outside(
        source, "Tutel's layer has no counterpart for tensor",
        (ours for ours, _ in NAMES.values())))
    columns = {field: {name: value for name, value in column.items()
                       if not name.endswith("_extra_state")}
               for field, column in source.values.get(COLUMNS, {}).items()}
    return View(source, tensors, format="tutel", values={**source.values, COLUMNS: columns})


def _table(source: Source) -> NameTable:
    return NameTable(NameRule(prefix + theirs, (prefix + ours,), swap) for prefix in source.layers
                     for theirs, (ours, swap) in NAMES.items())


def _keep_outside(source: Source, missing: str, known: Iterable[str]) -> Others:
    """Return a function that handles tensors for which there is no name rule. The function keeps
    tensors outside of MoE layers, and raises an error for tensors inside an MoE layer.

    Args:
        missing: beginning of the error message for tensors inside an MoE layer.
        known: names of the tensors that an MoE layer can have.
    """
    def others(one: Derived) -> Derived:
        if _split(one.key[1], source.layers)[0] is not None:
            raise CheckpointError(f"{missing} {one.key[1]!r}; its tensors are {', '.join(known)}")
        return one

    return others


def _split(name: str, layers: Mapping[str, Any]) -> tuple[str | None, str]:
    """Split a tensor name into the prefix of the MoE layer and the rest of the name. For tensors
    outside of MoE layers, the prefix is None.
    """
    for prefix in layers:
        if name.startswith((prefix + "experts.", prefix + "gates.", prefix + "router.")):
            return prefix, name.removeprefix(prefix)
    return None, name


def _part(one: Derived, rank: int, size: int, experts: int) -> Derived:
    """Given a tensor with all experts, return the slice that a rank's file contains."""
    shards = max(1, size // experts)
    local = experts * shards // size
    run, shard = divmod(rank, shards)
    rows = slice(run * local, (run + 1) * local)
    if shards == 1:
        return part_of(one, (rows,))
    width = one.entry.shape[1]
    each = -(-width // shards)
    if one.key[1].endswith("batched_fc2_bias"):
        one = _filled_up(one, each * shards)
    elif width % shards:
        raise ValueError(f"{one.key[1]!r} has the inner width {width}, which cannot be divided "
                         f"among {shards} ranks for each expert: the width must be a multiple of "
                         "the number of ranks; choose another --world")
    return part_of(one, (rows, slice(shard * each, (shard + 1) * each)))


def _filled_up(one: Derived, width: int) -> Derived:
    """Pad a tensor of shape [E, M] with zeros to the shape [E, width]."""
    def read(window: Window) -> torch.Tensor:
        inside = [slice(min(at.start, end), min(at.stop, end))
                  for at, end in zip(window, one.entry.shape, strict=True)]
        found = one.read(tuple(inside))
        whole = found.new_zeros(window_shape(window))
        whole[:, :found.shape[1]] = found
        return whole

    return Derived(one.key, TensorEntry((one.entry.shape[0], width), one.entry.dtype), read)


@formats.register("tutel")
class TutelFormat(Format):
    """Checkpoints of Tutel: one state dict per rank, or a single state dict with all experts."""

    name = "tutel"
    views_as, views_of = {"plain": to_plain}, {"plain": from_plain}
    sizes = frozenset({"world", "ep"})

    def detect(self, path: Path, trust: bool = False) -> bool:
        try:
            paths = rank_files(path)
            if not paths or paths[0].suffix not in SUFFIXES:
                return False
            return any(name.endswith(COUNT) for name in _open_file(paths[0], trust))
        except CheckpointError:
            return False

    def open(self, path: Path, trust: bool = False) -> Source:
        paths = rank_files(path)
        if not paths:
            raise CheckpointError(f"there is no checkpoint of Tutel at {str(path)!r}: use its "
                                  "folder, its file, or a pattern such as "
                                  f"DIR/{{rank}}-of-{{size}}.pt")
        return _open_ranks(paths, trust)

    def write(self, source: Source, path: Path, layout: CheckpointSizes,
              progress: WriteProgress = WriteProgress()) -> None:
        """See `Format`. The files are named `{rank}-of-{size}.pt`."""
        fields = sorted({field for field, _ in source.entries} - {MODEL})
        if fields:
            raise CheckpointError("Tutel's checkpoints have no optimizer state, but the source "
                                  f"has {fields[0]!r}; use --model-only")
        size = layout.one_group(
            source.describe().get("ranks", 1) if source.format == self.name else 1)
        for experts in {origin["num_experts"] for origin in source.layers.values()}:
            if experts % size and size % experts:
                raise ValueError(f"--world {size} is invalid for {experts} experts: it must be a "
                                 "divisor or a multiple of the number of experts")
        write_files(path, {f"{rank}-of-{size}.pt": partial(_state_of_rank, source, rank, size)
                           for rank in range(size)}, progress)


def _state_of_rank(source: Source, rank: int, size: int) -> dict[str, Any]:
    state = dict(source.values.get(COLUMNS, {}).get(MODEL, {}))
    for key in source.entries:
        prefix, inner = _split(key[1], source.layers)
        tensor = source.tensor(key)
        if prefix is not None and inner.startswith("experts."):
            tensor = _part(tensor, rank, size, source.layers[prefix]["num_experts"])
        state[key[1]] = tensor
    for prefix, origin in source.layers.items():
        state[prefix + COUNT] = torch.tensor(origin["num_experts"])
    return state
