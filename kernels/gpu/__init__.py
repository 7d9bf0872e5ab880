"""Implementations for GPU: Triton kernels, and the expert strategy that is made of them.

A module that needs Triton is imported when one of its operations first runs, so that the package
works without Triton.
"""
