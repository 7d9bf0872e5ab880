"""The `moe-plugin` command. The modules of `moe_plugin.cli` are only imported by this package
itself.
"""
