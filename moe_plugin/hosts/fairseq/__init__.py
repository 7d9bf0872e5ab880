"""Integration into fairseq: models, criteria, scaling of gradients, and checkpoints.

`register` adds them to fairseq's registries.
"""
