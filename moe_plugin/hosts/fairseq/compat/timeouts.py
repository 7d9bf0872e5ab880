"""Time-outs of fairseq's own process groups."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def shorten_timeouts(timeout_s: float) -> None:
    """Let no group that fairseq uses wait longer than this.

    All ranks call it, after the world is initialized.

    fairseq <= 0.12.3 passes a time-out neither to `init_process_group` nor to the `new_group` in
    which it reduces gradients, and has no setting for it: torch's 30 minutes apply (10 under NCCL).
    torch 2.6 to 2.13 change the time-out of a group that exists by `_set_pg_timeout` alone.
    """
    from fairseq.distributed import utils

    wanted = timedelta(seconds=timeout_s)
    for group in (dist.group.WORLD, utils.get_global_group()):
        if isinstance(group, dist.ProcessGroup) and wanted < _timeout(group):
            distributed_c10d._set_pg_timeout(wanted, group)


def _timeout(group: dist.ProcessGroup) -> timedelta:
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    return group._get_backend(device).options._timeout
