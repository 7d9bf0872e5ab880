"""Gradients of models of which every rank stores a part: reduced, counted once, clipped."""
