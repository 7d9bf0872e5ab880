"""Offloading of activations to host memory or to disk, and recomputation of activations in backward
passes.
"""
