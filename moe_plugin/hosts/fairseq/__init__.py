"""Integration into fairseq: models, criteria, gradient scaling and checkpoints.

`register` adds the models and criteria to fairseq's registries.
"""
