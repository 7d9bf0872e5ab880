"""Checkpoints of expert-parallel models.

Experts are stored by global expert index, so any number of ranks can load a checkpoint that was
written by a different number of ranks.
"""

from moe_plugin.checkpoint.reshard import merge, split
from moe_plugin.checkpoint.save_load import load, save
from moe_plugin.checkpoint.source import CheckpointError

__all__ = ["CheckpointError", "load", "merge", "save", "split"]
