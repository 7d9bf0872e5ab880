"""Implementations for GPUs: Triton kernels, and the expert strategy built from them.

Modules that need Triton are imported when one of their operations first runs, so that the package
works without Triton.
"""
