"""Gradients of models whose parameters are distributed over ranks: reduction, norms and clipping.
"""
