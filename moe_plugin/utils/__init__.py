"""General utilities for messages, files, registries, and properties of this machine."""
