"""Train a GPT language model with our MoE layer, for users who have megatron-core and no training
script.

    torchrun --nproc_per_node 2 -m moe_plugin.hosts.megatron.train --data-path data/corpus
    --num-layers 4 ...

On CPU (gloo) and GPU (NCCL). See docs/megatron.md.
"""

from __future__ import annotations

import logging
import os
import sys

from moe_plugin.hosts.megatron.endings import status_of
from moe_plugin.hosts.megatron.trainer import arguments


def main(argv: list[str] | None = None) -> int:
    """Command line; the status with which the process ends (`endings.status_of`)."""
    parser = arguments.parser()
    args = parser.parse_args(argv)
    _log_from_rank_zero()

    def work() -> None:
        # imported here: it imports Megatron, which warns
        from moe_plugin.hosts.megatron.trainer import train

        train.run(args, train.start(args))

    return status_of(parser.prog, work, lambda: vars(args))


def _log_from_rank_zero() -> None:
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    for name in ("moe_plugin", "moe_plugin.megatron"):
        logging.getLogger(name).setLevel(level)


if __name__ == "__main__":
    raise SystemExit(main())
