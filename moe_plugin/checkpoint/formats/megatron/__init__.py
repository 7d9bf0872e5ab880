"""Functions that read, convert and write Megatron's distributed checkpoints in one process.

Megatron itself is not needed.
"""
