"""Faults injected into training runs of plain PyTorch, fairseq and Megatron."""
