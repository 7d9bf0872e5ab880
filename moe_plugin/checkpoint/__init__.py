"""Checkpoints of expert-parallel models: shards by global expert index, from any number of ranks to
any other.
"""

from moe_plugin.checkpoint.reshard import merge, split
from moe_plugin.checkpoint.save_load import load, save
from moe_plugin.checkpoint.source import CheckpointError

__all__ = ["CheckpointError", "load", "merge", "save", "split"]
