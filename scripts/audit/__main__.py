"""Run the command `moe-plugin audit` from this checkout: `python scripts/audit ...`."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent  # removed from sys.path, because it belongs to a package

if __name__ == "__main__":
    sys.path[:] = [str(FOLDER.parents[1]), *(p for p in sys.path if Path(p).resolve() != FOLDER)]
    from moe_plugin.cli.main import main

    raise SystemExit(main(["audit", *sys.argv[1:]]))
