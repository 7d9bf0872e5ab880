"""Comparison of whole training steps with our layer and with the framework's own layer."""
