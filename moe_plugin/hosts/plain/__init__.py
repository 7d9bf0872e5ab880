"""Our layer in plain PyTorch: blocks, data parallelism, the steps of a training loop."""
