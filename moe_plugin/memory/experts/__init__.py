"""Experts whose weights lie on the host or on disk; a cache on the device holds a few."""
