"""The `moe-plugin` command. No module outside this package imports `moe_plugin.cli`."""
