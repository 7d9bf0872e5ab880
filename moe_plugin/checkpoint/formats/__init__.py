"""Checkpoint formats, each in a separate module or package; `all` registers them."""
