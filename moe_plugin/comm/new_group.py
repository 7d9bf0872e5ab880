"""A process group of some ranks, made by these ranks alone.

`torch.distributed.new_group` makes groups in two ways, and neither serves here. The usual one is
collective over the whole job, but the rest of the job may not know this group and would never
answer. The local one (`use_local_synchronization`) derives the group's name from the number of
groups that the rank has: ranks that made different numbers of groups before wait for each other
under different names. Here the name comes from the ranks and from how many groups of exactly these
ranks were made, which all of them know alike.
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

_SAID = os.strerror(errno.EMFILE)  # in errors of gloo, which have no number


def too_many(error: BaseException) -> str:
    """The limit, what is needed and the remedy; empty: the error has another cause."""
    if getattr(error, "errno", None) not in (errno.EMFILE, errno.ENFILE) and (
            _SAID not in str(error)):
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    return (f"this process may open {soft} files at once (`ulimit -n`, up to {most} here), which "
            "is too few for its connections: a rank of two in Megatron needs about 160, one of "
            "more ranks needs more. Run `ulimit -n 4096` in the shell that starts the ranks")


if dist.is_available():
    from torch.distributed import distributed_c10d as c10d


def make_group(parent: dist.ProcessGroup, ranks: Sequence[int], made: dict[tuple[int, ...], int],
               timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """A new group. All its ranks call it, in the same order, no other.

    Args:
        parent: an existing group that has these ranks.
        ranks: of the job, this one among them, in any order; the group has them in rising order.
        made: how many groups were made of which ranks in this job; counted on.
        timeout: of the group's collectives.
        backend: None: that of `parent`.
    Raises: RuntimeError: from the backend, which connects gloo's ranks here.
    """
    ranks = sorted(ranks)
    key = tuple(ranks)
    made[key] = made.get(key, 0) + 1
    store = c10d._world.pg_map[dist.group.WORLD][1]
    with _not_split():
        group, _ = c10d._new_process_group_helper(
            len(ranks), ranks.index(dist.get_rank()), ranks,
            backend or dist.get_backend(parent), store,
            f"moe_plugin/{made[key]}/{'_'.join(map(str, ranks))}", timeout=timeout,
            group_desc="moe_plugin")
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


@contextmanager
def _not_split() -> Iterator[None]:
    """Groups made inside are not split off the default group.

    Where that group is bound to a device (`init_process_group(device_id=...)`), torch would make
    an NCCL group by `ncclCommSplit`, in which all ranks of the job must take part.
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
