"""Code that runs around a training step: runs, features, gradients, fault tolerance and ensembles.
"""
