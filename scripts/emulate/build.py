"""Compiles the switch at its first use, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from moe_plugin.utils.machine import user_cache

SOURCE = Path(__file__).with_name("switch.c")
COMPILERS = ("cc", "gcc", "clang")


def compiler() -> str | None:
    """The C compiler's path, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build_switch(cache: Path | None = None) -> Path:
    """The compiled switch; its name contains the digest of its source, so a new version recompiles.

    Raises: ValueError: no compiler, or it fails, with its message.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = user_cache("the emulated cluster's switch cannot be compiled there",
                        cache) / f"switch-{digest}"
    if target.exists():
        return target
    cc = compiler()
    if cc is None:
        raise ValueError(
            f"no C compiler ({', '.join(COMPILERS)}) for the emulated cluster's switch; on Debian "
            "or Ubuntu: sudo apt-get install gcc")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "switch"
        done = subprocess.run([cc, "-O2", "-o", str(made), str(SOURCE)], capture_output=True,
                              text=True, check=False)
        if done.returncode:
            raise ValueError(f"{cc} could not compile {SOURCE}: {done.stderr.strip()}")
        os.replace(made, target)  # atomic, also when two processes build at once
    return target
