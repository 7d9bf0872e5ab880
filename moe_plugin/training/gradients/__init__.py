"""Gradients of models that are distributed over ranks: reduction, norms and clipping."""
