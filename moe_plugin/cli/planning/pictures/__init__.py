"""Pictures of a collective's schedule that show the network, the cut and the trees.

The package does not import torch.
"""

from moe_plugin.cli.planning.pictures.draw import drawing
from moe_plugin.cli.planning.pictures.page import page

__all__ = ["drawing", "page"]
