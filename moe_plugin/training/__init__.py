"""What happens around a training step: the run, its features, gradients, resilience, ensembles."""
