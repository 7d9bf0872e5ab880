"""The `moe-plugin` command. No other module of the package imports this one."""
