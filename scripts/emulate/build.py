"""Compile the switch on first use, and store the compiled program in the user's cache."""

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
    """Return the path of a C compiler, or None if no compiler is installed."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build_switch(cache: Path | None = None) -> Path:
    """Return the path of the compiled switch. The switch is compiled first if necessary.

    The file name contains a hash of the source code, so that changed source code is compiled again.

    Raises:
        ValueError: if there is no C compiler, or the compiler fails. The error message contains the
            compiler's output.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = user_cache("the emulated cluster's switch cannot be compiled there",
                        cache) / f"switch-{digest}"
    if target.exists():
        return target
    cc = compiler()
    if cc is None:
        raise ValueError(
            f"The emulated cluster's switch needs a C compiler ({', '.join(COMPILERS)}), and none "
            "is installed. On Debian or Ubuntu, run sudo apt-get install gcc")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "switch"
        done = subprocess.run([cc, "-O2", "-o", str(made), str(SOURCE)], capture_output=True,
                              text=True, check=False)
        if done.returncode:
            raise ValueError(f"{cc} could not compile {SOURCE}: {done.stderr.strip()}")
        os.replace(made, target)  # atomic, because two processes may compile at the same time
    return target
