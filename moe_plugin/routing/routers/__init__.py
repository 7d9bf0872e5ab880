"""Routers, one file each. They register by name in `moe_plugin.routing.registry`."""
