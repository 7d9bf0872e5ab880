"""Code around training steps: runs, features, gradients, fault tolerance, ensembles."""
