"""Passes over the experts' inner values, written in C and compiled on the machine that runs
them.
"""
