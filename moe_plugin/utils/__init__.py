"""General utilities that do not depend on experts, for messages, files, registries, and properties
of this machine.
"""
