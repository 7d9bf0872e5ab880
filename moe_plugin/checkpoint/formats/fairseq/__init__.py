"""Checkpoints of fairseq with our layers, and of its `moe` branch, without fairseq."""
