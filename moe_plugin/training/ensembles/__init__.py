"""Losses over the outputs of a model. For router losses see `moe_plugin.routing.losses`."""
