"""Elementwise operations between two matmuls of an expert, in a single pass over the values.

The operations are implemented in C and compiled on the user's machine.
"""
