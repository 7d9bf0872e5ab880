"""Choices made while training runs: layouts, exchanges and expert compute."""
