"""Losses computed from a model's outputs. See `moe_plugin.routing.losses` for router losses."""
