"""MoE layers for plain PyTorch, with blocks, data parallelism and the steps of a training loop."""
