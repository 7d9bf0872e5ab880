"""Run torchrun on an emulated node. Messages that the last nodes to finish would print are
suppressed.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent  # its modules are part of a package


def main() -> None:
    """Run torchrun with the arguments of this script's command line."""
    sys.path[:] = [str(FOLDER.parents[1]), *(p for p in sys.path if Path(p).resolve() != FOLDER)]
    from torch.distributed.run import main as torchrun

    from moe_plugin.utils.quiet import TORCHRUN_LINES, hide

    hide((), TORCHRUN_LINES)
    torchrun()


if __name__ == "__main__":
    main()
