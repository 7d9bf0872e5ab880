"""A host's own collectives, named where they fail: they go through a `Comm`, as the layer's do, or
run inside its `error_context`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from moe_plugin.comm import LocalComm, TorchComm
from moe_plugin.comm.base import Comm


def comm_of(group: Any = None, timeout_s: float = 1800.0) -> Comm:
    """The `Comm` of a host's process group; None: of all ranks.

    timeout_s: how long a collective may take, where the group itself allows as much.
    """
    size = dist.get_world_size(group)
    return LocalComm() if size == 1 else TorchComm(group, timeout_s)


@contextmanager
def named(what: str, group: Any = None) -> Iterator[None]:
    """Raise a failure inside as a `CommError` that names rank, group and collective.

    Costs nothing where nothing fails.

    Args:
        what: the collective and what it is for, e.g. "all_reduce of the gradient norm".
        group: process group; None: the default group.
    """
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized():  # ranks are still meeting: there is no group to name
            raise
        with comm_of(group).error_context(lambda: what):
            raise error


@contextmanager
def collectives_named(what: str, group: Any = None) -> Iterator[None]:
    """As `named`, around code that does other things as well: only what torch's process groups
    raise is named, such as a lost connection of the reductions that DistributedDataParallel starts
    within backward.

    Args: see `named`.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo's errors have no class of their own; they begin with the file that they come from
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        with named(what, group):
            raise


@contextmanager
def refused_together(what: str, group: Any = None) -> Iterator[None]:
    """A `ValueError` of any rank inside is raised on all ranks. Collective.

    Args:
        what: the check in words, for the message of a collective that fails.
        group: process group; None: the default group.
    """
    said = ""
    try:
        yield
    except ValueError as error:
        said = str(error)
    for refusal in filter(None, gather_objects(said, what, group)):
        raise ValueError(refusal)


def gather_objects(value: Any, what: str, group: Any = None) -> list[Any]:
    """The values of all ranks of a group, in rank order. Collective.

    Args:
        value: of this rank; must pickle.
        what: the values in words, for the message.
        group: process group; None: the default group.
    Raises: CommError: the collective failed or timed out.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with named(f"all_gather of {what}", group):
        dist.all_gather_object(everyone, value, group=group)
    return everyone
