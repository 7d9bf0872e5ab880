"""A mutation study of the package's core; see `__main__.py`."""
