"""Short scripts on Megatron's own training loop, which the launcher knows by name; each is an
example to start one's own from, and imports nothing of this package.
"""
