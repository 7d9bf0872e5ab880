"""Checkpoint formats, each in a separate module or package. The module `all` registers them."""
