"""The `moe-plugin` command. No module outside this package imports it."""
