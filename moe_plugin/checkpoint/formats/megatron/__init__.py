"""Read, convert and write Megatron's distributed checkpoints in a single process.

Megatron does not need to be installed.
"""
