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

import torch.distributed as dist

from moe_plugin.comm.job_abort import claim_first_report, is_of_another_rank, says_why
from moe_plugin.config.flags import as_given
from moe_plugin.dispatch.rows_limit import RowsOverflow
from moe_plugin.hosts.megatron.trainer import arguments
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS
from moe_plugin.memory.tiers import TierError
from moe_plugin.quiet import MEGATRON, hidden
from moe_plugin.resilience.stopping import stops_in_one_line
from moe_plugin.resilience.twins import WrongResultError


def main(argv: list[str] | None = None) -> int:
    """Command line. Errors of use end with a message and status 2, numbers that stay not
    finite or are wrong on a rank, a full disk and the end of another rank, with status 1, on every
    rank. The first rank that has a message says it: others may have none.
    """
    parser = arguments.parser()
    args = parser.parse_args(argv)
    _log_from_rank_zero()
    try:
        with stops_in_one_line(), hidden(MEGATRON), says_why():
            # imported here: it imports Megatron, which warns
            from moe_plugin.hosts.megatron.trainer import train

            train.run(args, train.start(args))
    except Exception as error:
        if not isinstance(error, _SAY_ALL) and not is_of_another_rank(error):
            raise
        logging.getLogger().setLevel(logging.ERROR)
        rank = os.environ.get("RANK", "0")
        if claim_first_report(str(error)) if dist.is_initialized() else rank == "0":
            where = "" if rank == "0" else f" (rank {rank})"
            text = as_given(str(error), vars(args), NATIVE_ARGUMENTS)
            sys.stderr.write(f"{parser.prog}: error: {text}{where}\n")
        return 2 if isinstance(error, ValueError) else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


# errors whose message says all
_SAY_ALL = ValueError, FloatingPointError, RowsOverflow, WrongResultError, TierError


def _log_from_rank_zero() -> None:
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    for name in ("moe_plugin", "moe_plugin.megatron"):
        logging.getLogger(name).setLevel(level)


if __name__ == "__main__":
    raise SystemExit(main())
