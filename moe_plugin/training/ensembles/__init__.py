"""Losses over a model's outputs (losses of routers: `moe_plugin.routing.losses`)."""
