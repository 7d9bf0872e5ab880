"""Checkpoints of fairseq with this package's layers, and of fairseq's `moe` branch. fairseq itself
is not needed.
"""
