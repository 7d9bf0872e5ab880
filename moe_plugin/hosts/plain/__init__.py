"""MoE layers for plain PyTorch: blocks, data parallelism, and the steps of a training loop."""
