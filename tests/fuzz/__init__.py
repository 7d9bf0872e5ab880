"""Hostile text, numbers and bytes, bounded in time and the same in every run."""
