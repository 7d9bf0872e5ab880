"""Code that runs before, during and after each training step: runs, features, gradients, fault
tolerance and ensembles.
"""
