"""Pictures of the schedule of a collective. The pictures show the network, its cut and the trees.

This subpackage does not import torch.
"""

from moe_plugin.cli.planning.pictures.draw import drawing
from moe_plugin.cli.planning.pictures.page import page

__all__ = ["drawing", "page"]
