"""Passes over the experts' inner values. They are written in C and compiled on the user's machine.
"""
