"""Passes over the experts' inner values.

The passes are written in C and compiled on the user's machine.
"""
