"""A function that creates a process group without the participation of ranks outside the new group.

`torch.distributed.new_group` offers two ways to create a group, and neither can be used here. By
default, all ranks of the job must call `new_group`, but ranks outside the new group may never call
it. With `use_local_synchronization`, torch derives the group's name from the number of groups that
the rank has created. With `use_local_synchronization`, ranks that have created different numbers of
groups would wait for each other under different names. This module derives the name from the ranks
of the group and from the number of groups already created for exactly these ranks. This number is
the same on all ranks of the new group.
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
    """If `error` was caused by the limit on open files, return a message with the limit, the
    required number of files and the remedy. For any other error, return an empty string.
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
    """Create a process group. Exactly the ranks of the new group must call this function, and all
    of them must create their groups in the same order.

    Args:
        parent: existing group that contains the ranks of the new group.
        ranks: global ranks of the new group in any order, including this rank. The new group
            numbers these ranks in ascending order.
        made: mapping from each set of ranks in this job to the number of groups created for this
            set so far. `make_group` updates `made`.
        timeout: timeout for the collectives of the group.
        backend: optional. Defaults to the backend of `parent`.
    Raises:
        RuntimeError: If the backend fails, for example while connecting the ranks with gloo.
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
    """Inside the block, prevent torch from creating groups by splitting the default group.

    If the default group is bound to a device (`init_process_group(device_id=...)`), torch creates
    NCCL groups with `ncclCommSplit`, which all ranks of the job must call.
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
