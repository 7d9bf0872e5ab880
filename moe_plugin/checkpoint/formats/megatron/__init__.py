"""Reading, converting and writing of Megatron's distributed checkpoints in one process.

Megatron itself is not needed.
"""
