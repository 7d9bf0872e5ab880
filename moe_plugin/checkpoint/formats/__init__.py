"""Formats of checkpoints, one module or package a format; `all` registers them."""
