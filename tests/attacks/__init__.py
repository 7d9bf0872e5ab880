"""Attacks: hostile files and ranks. No file runs code, and no file forges what a user reads."""
