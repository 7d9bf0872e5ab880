"""Runs in a fresh process; imports nothing itself."""

import sys


def modules_after(code: str) -> set[str]:
    """Top-level modules that are loaded once `code` has run."""
    exec(code, {})
    return {name.split(".")[0] for name in sys.modules}
