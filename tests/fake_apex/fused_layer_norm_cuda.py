"""Imports where apex has its layer norm kernels."""
