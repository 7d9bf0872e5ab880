"""A swarm's folder: a file of each stage, and one that names them, which is written last."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import torch

from moe_plugin.checkpoint import trust
from moe_plugin.training.resilience.swarm.messages import Message
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import cut
from moe_plugin.utils.regular_files import make_folder, write_regular

_INDEX = "swarm.json"


def save_swarm(folder: str | os.PathLike[str], step: int, states: list[Message]) -> Path:
    """Write all stages of one step; what was there before is valid until the last file is."""
    path = make_folder(folder)
    names = [f"step_{step}_stage_{number}.pt" for number in range(len(states))]
    for name, state in zip(names, states, strict=True):
        made = io.BytesIO()
        torch.save(state, made)
        content = made.getvalue()
        write_regular(path / name, content + checksums.trailer(checksums.crc32(content)))
    write_regular(path / _INDEX, checksums.seal_json({"step": step, "stages": names}))
    for old in path.glob("step_*_stage_*.pt"):
        if old.name not in names:
            old.unlink()
    return path


def load_swarm(folder: str | os.PathLike[str], stages: int) -> tuple[int, list[Message | None]]:
    """(step, states by stage).

    Raises: ValueError: no such folder, of another number of stages, or a damaged file.
    """
    path = Path(folder) / _INDEX
    if not path.is_file():
        raise ValueError(f"{path} is missing: give a folder that `Swarm.save` wrote")
    try:
        index, _ = checksums.open_json(path.read_text(encoding="utf-8"))
        step, names = int(index["step"]), list(index["stages"])
        if len(names) == stages:
            found: list[Message | None] = []
            for name in names:
                path = Path(folder) / name
                checksums.verify(path)
                found.append(trust.load(path, (), name))
            return step, found
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError,
            pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read ({cut(str(error), 200)}): give another folder "
                         "that `Swarm.save` wrote") from error
    raise ValueError(f"{path} has {len(names)} stages, the swarm {stages}: give as many")
