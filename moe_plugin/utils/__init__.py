"""Utilities for messages, files, registries, and properties of the machine."""
