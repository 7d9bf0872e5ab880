"""Triton implementations. Nothing here is imported unless Triton is installed and an operation asks
for it.
"""
