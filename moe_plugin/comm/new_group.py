"""Creation of a process group by its own ranks, without participation of the other ranks of the
job.

`torch.distributed.new_group` offers two ways to create groups, and neither is suitable here. By
default, the call is collective over the whole job, but ranks outside the group may never call it.
With `use_local_synchronization`, the group's name is derived from the number of groups that the
rank has created. Ranks that created different numbers of groups would wait for one another under
different names. This module derives the name from the ranks of the group and from the number of
groups created for exactly these ranks. This number is the same on all of them.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_SAID = os.strerror(errno.EMFILE)  # gloo's errors contain only this text, not the error number


def too_many(error: BaseException) -> str:
    """If `error` was caused by the limit on open files, return a string with the limit, the number
    needed and the remedy. Otherwise return an empty string.
    """
    if getattr(error, "errno", None) not in (errno.EMFILE, errno.ENFILE) and (
            _SAID not in str(error)):
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    return (f"this process may open {soft} files at once (`ulimit -n`, up to {most} here), which "
            "is too few for its connections. In Megatron, each of two ranks needs about 160; "
            "more ranks need more. Run `ulimit -n 4096` in the shell that starts the ranks")


if dist.is_available():
    from torch.distributed import distributed_c10d as c10d


def make_group(parent: dist.ProcessGroup, ranks: Sequence[int], made: dict[tuple[int, ...], int],
               timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """Create a process group. All ranks of the group, and no other ranks, must call this function
    in the same order.

    Args:
        parent: existing group that contains the ranks of the new group.
        ranks: global ranks in any order, including this rank. The new group contains these ranks in
            ascending order.
        made: mapping from each set of ranks in this job to the number of groups created for it so
            far. This function updates the mapping.
        timeout: timeout of the group's collectives.
        backend: optional. Defaults to the backend of `parent`.
    Raises:
        RuntimeError: If the backend failed, for example while it connected gloo's ranks.
    """
    ranks = sorted(ranks)
    key = tuple(ranks)
    made[key] = made.get(key, 0) + 1
    assert dist.group.WORLD is not None
    store = c10d._world.pg_map[dist.group.WORLD][1]
    with _not_split():
        name: Any = f"moe_plugin/{made[key]}/{'_'.join(map(str, ranks))}"
        group, _ = c10d._new_process_group_helper(
            len(ranks), ranks.index(dist.get_rank()), ranks,
            backend or dist.get_backend(parent), store,
            name, timeout=timeout,
            group_desc="moe_plugin")
    # As in `torch.distributed.new_group`. Without this entry, torch could not convert global ranks
    # to ranks of the group.
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


@contextmanager
def _not_split() -> Iterator[None]:
    """Prevent torch from creating groups inside the block by splitting the default group.

    If the default group is bound to a device (`init_process_group(device_id=...)`), torch creates
    an NCCL group with `ncclCommSplit`, in which all ranks of the job must take part.
    """
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
