"""The `moe-plugin` command. The modules of `moe_plugin.cli` are private to this package."""
