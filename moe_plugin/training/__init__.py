"""Code that runs around a training step: the run with its features, gradients, fault tolerance and
ensembles.
"""
