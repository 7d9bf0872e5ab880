"""One file for each system: the command that a user would type, then a check of its numbers against
an independent reference.
"""
