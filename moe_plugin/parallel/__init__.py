"""Fitting the layer to groups of ranks, and recomputation."""
