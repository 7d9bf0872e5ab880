"""Short scripts that use Megatron's own training loop. The launcher finds them by name.

Each script is an example that you can copy and extend. It imports nothing from this package.
"""
