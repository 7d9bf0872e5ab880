"""torchrun on an emulated node, without the line that the last nodes to end would write."""

from __future__ import annotations

from moe_plugin.quiet import TORCHRUN_LINES, hide


def main() -> None:
    """torchrun with its own arguments."""
    from torch.distributed.run import main as torchrun

    hide((), TORCHRUN_LINES)
    torchrun()


if __name__ == "__main__":
    main()
