"""The `moe-plugin` command. Nothing in the package imports this."""
