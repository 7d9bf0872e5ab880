"""Choices of layouts, exchanges and expert implementations that are made during training."""
