"""Whole training steps in a host framework: our layer beside the framework's own, in turn."""
