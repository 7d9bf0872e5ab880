"""Whole training steps in a host framework: our layer and the framework's own, step by step."""
