"""Offloading of activations to the host or to disk, and their recomputation in backward."""
