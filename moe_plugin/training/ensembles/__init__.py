"""Losses that are computed from the outputs of a model. For losses of routers, see
`moe_plugin.routing.losses`.
"""
