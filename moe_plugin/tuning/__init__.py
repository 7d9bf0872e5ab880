"""Choices of layouts, exchanges and expert compute that are made during training."""
