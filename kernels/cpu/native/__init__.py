"""Passes over experts' inner values in C, compiled on the machine that runs them."""
