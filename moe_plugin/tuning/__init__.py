"""Choices of layouts, exchanges and expert implementations, made during training."""
