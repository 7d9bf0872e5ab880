"""Implementations for GPUs: Triton kernels, and the expert strategy that uses them.

Modules that need Triton are imported when one of their operations first runs, so the package works
without Triton.
"""
