"""All formats of checkpoints: importing this registers them. Their modules import no framework."""

from moe_plugin.checkpoint.formats import formats

__all__ = ["formats"]
