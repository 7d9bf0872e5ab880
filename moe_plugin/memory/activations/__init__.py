"""Activations that wait for backward on the host or on disk, or are computed again."""
