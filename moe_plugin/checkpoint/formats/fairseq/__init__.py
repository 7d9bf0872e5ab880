"""Checkpoints of fairseq with our layers, and of fairseq's `moe` branch; fairseq is not needed."""
