"""Routers, with one module for each kind. The routers are registered by name in
`moe_plugin.routing.registry`.
"""
