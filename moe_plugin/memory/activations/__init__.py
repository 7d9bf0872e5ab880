"""Offloading of activations to host memory or disk, and recomputation in the backward pass."""
