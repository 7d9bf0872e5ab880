"""Integration into fairseq, with models, criteria, gradient scaling and checkpoints.

`register` adds the models and criteria to fairseq's registries.
"""
