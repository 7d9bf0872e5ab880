"""Measurements of `recommend`, `calibrate` and `profile-device` on the ranks that run them."""
