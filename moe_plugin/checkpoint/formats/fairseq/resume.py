"""Resuming a fairseq run from a checkpoint that was written by a different number of ranks.

Every rank reads only the slices that it stores, including the slices of the optimizer state.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_plugin.checkpoint import CheckpointError, torch_files, trust
from moe_plugin.checkpoint.conversion import without_optimizer
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.formats.fairseq.files import without_rank
from moe_plugin.checkpoint.formats.fairseq.format import (
    Written,
    open_written,
    state_of_rank,
    survey,
)
from moe_plugin.checkpoint.reshard import columns_of_rank
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.utils import checksums

logger = logging.getLogger(__name__)


def newest_of_other_size(filename: str, wanted: Mapping[str, int], group: Any) -> Written | None:
    """Return the newest complete checkpoint with this name if it was written by a different number
    of ranks.

    The result is the same on all ranks. The result is None if the newest checkpoint was written by
    the same number of ranks.

    Args:
        filename: path of this rank's file.
        wanted: manifest entries of this run.
        group: process group of the data-parallel ranks, or None for a single rank.
    """
    found: Written | None = None
    if wanted["rank"] == 0:
        mine = wanted["world_size"], wanted["expert_parallel_size"]
        steps = survey(filename, trust.FLAG in sys.argv)
        newest = max((one.step for one in steps), default=0)
        sizes = {(one.world, one.ep): one for one in steps if one.step == newest}
        if mine not in sizes:
            found = next((one for one in sizes.values()
                          if one.experts == wanted["num_experts"]), None)
    return files.gather(found, group)[0]


def read_part(written: Written, wanted: Mapping[str, int], shards: Mapping[str, int],
              group: Any, model_only: bool = False) -> dict[str, Any]:
    """Return the state of this rank, which is read from the files of a different number of ranks.

    Args:
        written: the files of the checkpoint.
        wanted: manifest entries of this run.
        shards: see `state_of_rank`.
        group: process group of the data-parallel ranks, or None for a single rank.
        model_only: whether to leave out the optimizer state.
    Raises:
        CheckpointError: If a file is damaged. All ranks raise the error.
    """
    rank, world, ep = (wanted[key] for key in ("rank", "world_size", "expert_parallel_size"))
    errors = files.gather(damage(written.paths[rank::world]), group)
    for error in filter(None, errors):
        raise CheckpointError(error)
    if rank == 0:
        logger.info("checkpoint %s was written by %d ranks and is read by %d ranks",
                    written.paths[0], written.world, world)
    with (checksums.verified(map(Path, written.paths)),
          open_written(written, trust.FLAG in sys.argv) as whole):
        source = without_optimizer(whole) if model_only else whole
        return torch_files.read_all(state_of_rank(source, rank, world, ep, shards))


def damage(paths: tuple[str, ...], flag: str = "--restore-file") -> str | None:
    """Return a description of the first damaged file, or None if no file is damaged.

    flag: flag that selects a different checkpoint. The description mentions this flag.
    """
    for path in paths:
        try:
            checksums.verify(path)
        except (OSError, ValueError) as error:
            return f"checkpoint {path!r} is damaged: {error}; choose another checkpoint with {flag}"
    return None


def part_state(path: str, rank: int = 0, size: int = 1,
               leave_experts: bool = False) -> dict[str, Any]:
    """Return the model state for one of `size` ranks that share the experts.

    The files of the other ranks must be in the same folder. The files may have been written by any
    number of ranks.

    Args:
        path: path of any rank's file.
        rank, size: rank in the expert-parallel group, and size of this group.
        leave_experts: whether to return experts as `Derived` tensors, which `StoredExperts` reads
            one at a time.
    Raises:
        CheckpointError: If a file is missing or from a different step, or if a file in this rank's
            share is damaged.
        ValueError: If the experts cannot be divided among the ranks.
    """
    trusted = trust.FLAG in sys.argv
    left_out: list[str] = []
    steps = survey(path, trusted, left_out)
    if not steps:
        raise CheckpointError(
            f"checkpoint {without_rank(path)!r} is incomplete: "
            f"{'; '.join(left_out) or 'a file of a rank is missing, or of another step'}; restore "
            "the file, or choose another checkpoint with --path")
    if error := damage(steps[0].paths[rank::size], "--path"):
        raise CheckpointError(error)
    with open_written(steps[0], trusted) as source:
        state = columns_of_rank(source, rank, size)[MODEL]
        return {name: value if leave_experts and ".moe.experts." in name
                else torch_files.read_all(value) for name, value in state.items()}
