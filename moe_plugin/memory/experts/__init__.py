"""Experts stored on the host or on disk, with a cache of a few experts on the device."""
