"""Read and write models in the format of the published Swin-MoE checkpoints.

Each rank has one file: `PATH.rank0`, `PATH.rank1` and so on. Each file contains all parameters that
do not belong to experts, and the experts of the rank with the names that Tutel uses. If the file
`PATH.master` exists, it contains the parameters that do not belong to experts. The files of the
ranks then contain only experts. A dense model is stored in a single file, `PATH.global`.

If there are more ranks than experts, each expert is split along its inner width, and consecutive
ranks store the slices of one expert. The weights that are published in the Swin-Transformer
repository can be loaded into the presets `swin_moe_s` and `swin_moe_b`, with `--experts 8`, `16` or
`32`. Source of the format: `utils_moe.py` in the Swin-Transformer repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint import trust
from moe_plugin.checkpoint.formats.tutel import COUNT, NAMES, rank_files
from moe_plugin.checkpoint.layers import local_window
from moe_plugin.checkpoint.save_load import Leave
from moe_plugin.checkpoint.source import UNREADABLE, CheckpointError
from moe_plugin.comm import Comm, LocalComm
from moe_plugin.hosts.plain.blocks import MoEBlock, blocks_in
from moe_plugin.utils.messages import short

_OURS = {ours: (theirs, swap) for theirs, (ours, swap) in NAMES.items()}
# buffers that are computed from the sizes
_BUFFERS = ("relative_position_index", "relative_coords_table", "attn_mask", "k_bias")


def published_name(name: str) -> str:
    """Return the published name of a parameter that does not belong to an MoE layer.

    In published files, the layer that halves the resolution is the last layer of a stage. In timm,
    the layer that halves the resolution is the first layer of the following stage. The head in
    published files has no submodules.
    """
    name = re.sub(r"^layers\.(\d+)\.downsample\.",
                  lambda found: f"layers.{int(found[1]) - 1}.downsample.", name)
    return re.sub(r"^head\.fc\.", "head.", name)


def write_published(model: nn.Module, path: Path, comm: Comm | None = None) -> Path:
    """Write the file `PATH.rankN` of the current rank, and return its path.

    The file is renamed to this name only when it is complete.

    Raises:
        CheckpointError: If a layer has a parameter for which there is no published name.
    """
    comm = LocalComm() if comm is None else comm
    state = {published_name(name): value.detach().clone()
             for name, value in _others(model).items()}
    for name, block in blocks_in(model):
        prefix = f"{name}._moe_layer."
        state[prefix + COUNT] = torch.tensor(block.moe.config.num_experts)
        for ours, value in _parameters(block).items():
            if ours not in _OURS:
                raise CheckpointError(f"parameter {ours!r} of {name} has no published name. Tutel's"
                                      f" layers have only {', '.join(sorted(_OURS))}")
            theirs, swap = _OURS[ours]
            state[prefix + theirs] = (value.detach().mT if swap else value.detach()).contiguous()
    file = path.with_name(f"{path.name}.rank{comm.rank}")
    scratch = file.with_name(file.name + ".writing")
    torch.save({"model": state}, scratch)
    os.replace(scratch, file)
    return file


@torch.no_grad()
def read_published(model: nn.Module, path: Path, leave: Leave | None = None) -> None:
    """Read a published checkpoint, written by any number of ranks, into a model. The model is
    changed only if all files match the model.

    Args:
        model: model created by `moe_plugin.hosts.timm.model`.
        path: path of the files, without the suffix `.rankN`.
        leave: see `checkpoint.load`. `leave` is called only for parameters that do not belong to
            MoE layers.
    Raises:
        CheckpointError: If files are missing or unreadable, or if names or shapes do not match.
    """
    files = published_files(path)
    if not files:
        raise CheckpointError(f"neither {path}.rank0 nor {path}.global exists. Pass the path "
                              "without .rankN")
    master = path.with_name(path.name + ".master")
    common = _read(master) if master.exists() else {}
    # only the first file is read completely: the others repeat the parameters outside of experts
    states = [{**common, **_read(file, "" if file == files[0] else "._moe_layer.")}
              for file in files]
    copies: dict[str, tuple[Tensor, Tensor]] = {}
    targets = {published_name(name): value for name, value in _others(model).items()}
    blocks = dict(blocks_in(model))
    file_names = {name for name in states[0] if not any(part in name for part in _BUFFERS)
                  and not any(name.startswith(f"{block}._moe_layer.") for block in blocks)}
    if odd := sorted(file_names ^ set(targets)):
        where = "file" if odd[0] in file_names else "model"
        raise CheckpointError(f"{odd[0]!r} exists only in the {where}: {files[0]} has other sizes "
                              "or another backbone. Released weights need the preset swin_moe_s "
                              "or swin_moe_b")
    shapes = {name: tuple(states[0][published_name(name)].shape) for name in _others(model)}
    stay = set(map(published_name, () if leave is None else leave(shapes, {})))
    for name, target in targets.items():
        if name not in stay:
            copies[name] = target, states[0][name]
    for name, block in blocks.items():
        for ours, value in _parameters(block).items():
            copies[f"{name}.{ours}"] = value, _of_layer(states, name, ours, block)
    for name, (target, value) in copies.items():
        if target.shape != value.shape:
            raise CheckpointError(f"{name!r} has shape {tuple(value.shape)} in {files[0]}, but "
                                  f"{tuple(target.shape)} in the model. Build the model with the "
                                  "sizes of the files")
    for target, value in copies.values():
        target.copy_(value)


def _of_layer(states: list[dict[str, Tensor]], name: str, ours: str, block: MoEBlock) -> Tensor:
    theirs, swap = _OURS.get(ours, ("", False))
    key = f"{name}._moe_layer.{theirs}"
    if any(key not in state for state in states):
        raise CheckpointError(f"{ours!r} of {name} is not in the files. Build the model with the "
                              "same router and experts as in the files")
    if not ours.startswith("experts."):
        return states[0][key].mT if swap else states[0][key]
    experts, size = int(states[0][f"{name}._moe_layer.{COUNT}"]), len(states)
    shards = max(1, size // experts)  # number of consecutive ranks with slices of the same expert
    parts = [state[key] for state in states]
    if shards > 1:
        parts = [torch.cat(parts[at:at + shards], 1) for at in range(0, size, shards)]
    whole = torch.cat(parts)
    if theirs.endswith("fc2_bias"):  # cut along the width and padded with zeros
        whole = whole[:, :states[0][f"{name}._moe_layer.experts.batched_fc2_w"].shape[2]]
    whole = whole.mT if swap else whole
    if whole.shape[0] != experts or experts != block.moe.config.num_experts:
        raise CheckpointError(
            f"{name} has {experts} experts according to the files, the {size} files contain "
            f"{whole.shape[0]}, and the model has {block.moe.config.num_experts}. Use a model with "
            "the same number of experts, and all files")
    return whole[local_window(ours.removeprefix("experts."), tuple(whole.shape),
                              block.moe.placement)]


def published_files(path: Path) -> list[Path]:
    """Return the files of the checkpoint `PATH`, ordered by rank."""
    dense = path.with_name(path.name + ".global")
    return rank_files(path.with_name(path.name + ".rank{rank}")) or [dense] * dense.is_file()


def _others(model: nn.Module) -> Mapping[str, Tensor]:
    inside = tuple(f"{name}." for name, _ in blocks_in(model))
    return {name: p for name, p in model.named_parameters()
            if not (inside and name.startswith(inside))}


def _parameters(block: MoEBlock) -> dict[str, Tensor]:
    return dict(block.moe.named_parameters())


def _read(file: Path, part: str = "") -> dict[str, Tensor]:
    try:
        state: Any = trust.load(file, (), f"checkpoint file {str(file)!r}", map_location="cpu")
        return {name: value for name, value in state["model"].items()
                if isinstance(value, Tensor) and part in name}
    except trust.UntrustedFile:
        raise
    except UNREADABLE as error:
        raise CheckpointError(f"checkpoint file {str(file)!r} cannot be read: {short(error)}. Use "
                              "a file with its weights under 'model' that otherwise contains only "
                              "tensors, numbers and text") from error
