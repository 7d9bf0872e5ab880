"""Elementwise passes over the inner values of experts, between two matmuls.

The passes are implemented in C and compiled on the user's machine.
"""
