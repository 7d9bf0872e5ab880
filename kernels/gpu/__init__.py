"""Implementations for GPUs: Triton kernels, and the expert strategy that calls them.

A module that needs Triton is imported when one of its operations first runs, so the package also
works without Triton.
"""
