"""`python scripts/bench ...` runs `moe-plugin bench ...` from this checkout."""

from __future__ import annotations

import sys
from pathlib import Path

# Removed from sys.path below, because its modules are imported as parts of a package.
FOLDER = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path[:] = [str(FOLDER.parents[1]), *(p for p in sys.path if Path(p).resolve() != FOLDER)]
    from moe_plugin.cli.main import main

    raise SystemExit(main(["bench", *sys.argv[1:]]))
