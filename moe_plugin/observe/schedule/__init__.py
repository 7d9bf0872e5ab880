"""Pictures of a collective's schedule: the network, its cut, its trees. Never imports torch."""

from moe_plugin.observe.schedule.draw import drawing
from moe_plugin.observe.schedule.page import page

__all__ = ["drawing", "page"]
