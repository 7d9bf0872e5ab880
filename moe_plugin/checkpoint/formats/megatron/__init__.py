"""Megatron's distributed checkpoints read, converted and written in one process, without Megatron.
"""
