"""Checkpoints of fairseq models with this package's layers, and of fairseq's `moe` branch. fairseq
itself does not need to be installed.
"""
