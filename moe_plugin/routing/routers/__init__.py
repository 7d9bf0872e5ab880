"""Routers, one file each; they register by name in `moe_plugin.routing.registry`."""
