"""General utilities that do not depend on experts: messages, files, registries, and properties of
this machine.
"""
