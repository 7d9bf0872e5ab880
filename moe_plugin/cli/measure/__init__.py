"""Measurements for `recommend`, `calibrate` and `profile-device` on the ranks that run these
commands.
"""
