"""Helpers for launchers."""
