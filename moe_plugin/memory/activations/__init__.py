"""Offloading of activations to host memory or disk, and recomputation of activations in the
backward pass.
"""
