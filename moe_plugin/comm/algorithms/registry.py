"""The registry of all-to-all algorithms."""

from __future__ import annotations

from moe_plugin.comm.base import AllToAll
from moe_plugin.registry import Registry

algorithms: Registry[AllToAll] = Registry("all_to_all")
