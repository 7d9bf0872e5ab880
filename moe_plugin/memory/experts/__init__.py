"""Experts that are stored in host memory or on disk, with a cache that holds a few experts on the
device.
"""
