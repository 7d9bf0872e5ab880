"""Experts that are stored in host memory or on disk, with a cache for a few experts on the device.
"""
