"""Pictures of the schedule of a collective, which show the network, the cut and the trees.

The package does not import torch.
"""

from moe_plugin.cli.planning.pictures.draw import drawing
from moe_plugin.cli.planning.pictures.page import page

__all__ = ["drawing", "page"]
