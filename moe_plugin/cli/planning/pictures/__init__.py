"""Pictures of a collective's schedule: the network, its cut, its trees. Never imports torch."""

from moe_plugin.cli.planning.pictures.draw import drawing
from moe_plugin.cli.planning.pictures.page import page

__all__ = ["drawing", "page"]
