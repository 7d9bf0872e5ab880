"""Short example scripts that use Megatron's own training loop. The launcher finds scripts by name.

You can copy each script and extend it. The scripts do not import anything from this package.
"""
