"""A run resumes from the checkpoint of another number of ranks: every rank reads the slices that it
stores, optimizer state included.
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
    """The newest complete checkpoint of this name, where another number of ranks wrote it; the same
    on all ranks.

    Args:
        filename: this rank's file.
        wanted: manifest entries of this run.
        group: data-parallel ranks; None: this rank alone.
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
    """This rank's state from the files of other ranks.

    Args:
        model_only: leave optimizer state out.
    Raises:
        CheckpointError: a file is damaged; on every rank.
    """
    rank, world, ep = (wanted[key] for key in ("rank", "world_size", "expert_parallel_size"))
    errors = files.gather(damage(written.paths[rank::world]), group)
    for error in filter(None, errors):
        raise CheckpointError(error)
    if rank == 0:
        logger.info("the checkpoint %s of %d ranks is read by %d", written.paths[0], written.world,
                    world)
    with (checksums.verified(map(Path, written.paths)),
          open_written(written, trust.FLAG in sys.argv) as whole):
        source = without_optimizer(whole) if model_only else whole
        return torch_files.read_all(state_of_rank(source, rank, world, ep, shards))


def damage(paths: tuple[str, ...], flag: str = "--restore-file") -> str | None:
    """What is wrong with the first damaged file; flag: which names another checkpoint."""
    for path in paths:
        try:
            checksums.verify(path)
        except (OSError, ValueError) as error:
            return f"checkpoint {path!r} is damaged: {error}; give another one with {flag}"
    return None


def part_state(path: str, rank: int = 0, size: int = 1,
               leave_experts: bool = False) -> dict[str, Any]:
    """Model state of rank `rank` of `size` that share the experts, from the file of any rank.

    The files of the other ranks are next to it; any number of ranks may have written them.

    Args:
        leave_experts: their values are `Derived`, which `StoredExperts` reads one by one.
    Raises:
        CheckpointError: a file is missing, or of another step; a file of this rank's share is
            damaged.
        ValueError: the experts do not fit.
    """
    trusted = trust.FLAG in sys.argv
    left_out: list[str] = []
    steps = survey(path, trusted, left_out)
    if not steps:
        raise CheckpointError(
            f"checkpoint {without_rank(path)!r} is incomplete: "
            f"{'; '.join(left_out) or 'a file of a rank is missing, or of another step'}; restore "
            "it, or give another one with --path")
    if found := damage(steps[0].paths[rank::size], "--path"):
        raise CheckpointError(found)
    with open_written(steps[0], trusted) as source:
        state = columns_of_rank(source, rank, size)[MODEL]
        return {name: value if leave_experts and ".moe.experts." in name
                else torch_files.read_all(value) for name, value in state.items()}
