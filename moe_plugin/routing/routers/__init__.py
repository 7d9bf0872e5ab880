"""Routers, with one module for each type of router. `moe_plugin.routing.registry` registers the
routers by name.
"""
