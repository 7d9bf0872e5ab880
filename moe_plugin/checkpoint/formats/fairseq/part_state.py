"""What one evaluating process loads of a run's checkpoint files: all shared parameters and its own
experts, of which it reads only these from disk.
"""

from __future__ import annotations

import sys
from typing import Any

from moe_plugin.checkpoint import CheckpointError, torch_files, trust
from moe_plugin.checkpoint.formats.fairseq.files import without_rank
from moe_plugin.checkpoint.formats.fairseq.format import open_written, survey
from moe_plugin.checkpoint.formats.fairseq.resume import damage
from moe_plugin.checkpoint.ranks import columns_of_rank
from moe_plugin.checkpoint.source import MODEL


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
    steps = survey(path, trusted)
    if not steps:
        raise CheckpointError(
            f"checkpoint {without_rank(path)!r} is incomplete: a rank's file is missing, damaged "
            "or of another step; restore it, or give another one with --path")
    if found := damage(steps[0].paths[rank::size], "--path"):
        raise CheckpointError(found)
    with open_written(steps[0], trusted) as source:
        state = columns_of_rank(source, rank, size)[MODEL]
        return {name: value if leave_experts and ".moe.experts." in name
                else torch_files.read_all(value) for name, value in state.items()}
