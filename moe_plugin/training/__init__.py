"""Code around a training step: the run and its features, gradients, resilience and ensembles."""
