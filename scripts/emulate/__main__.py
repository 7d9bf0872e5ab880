"""Run the command `moe-plugin emulate` from this checkout: `python scripts/emulate ...`."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent  # its modules are part of a package

if __name__ == "__main__":
    sys.path[:] = [str(FOLDER.parents[1]), *(p for p in sys.path if Path(p).resolve() != FOLDER)]
    from moe_plugin.cli.main import main

    raise SystemExit(main(["emulate", *sys.argv[1:]]))
