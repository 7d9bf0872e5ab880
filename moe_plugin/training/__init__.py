"""Code that runs around each training step: runs, features, gradients, fault tolerance and
ensembles.
"""
