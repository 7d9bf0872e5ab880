"""Collectives of the host framework, with error messages that name the failed collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from moe_plugin.comm import LocalComm, TorchComm
from moe_plugin.comm.base import Comm


def comm_of(group: Any = None, timeout_s: float = 1800.0) -> Comm:
    """Return the `Comm` for a process group of the host framework.

    Args:
        group: optional. The process group. Defaults to the group of all ranks.
        timeout_s: maximum duration of a collective, in seconds. The timeout of the process group
            itself applies as well.
    """
    size = dist.get_world_size(group)
    return LocalComm() if size == 1 else TorchComm(group, timeout_s)


@contextmanager
def named(what: str, group: Any = None) -> Iterator[None]:
    """Convert a failure inside the block to a `CommError` whose message names the rank, the group
    and the collective.

    Args:
        what: description of the collective and its purpose, such as "all_reduce of the gradient
            norm".
        group: optional. The process group. Defaults to the default process group.
    """
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized():  # initialization itself failed, so there is no group to name
            raise
        with comm_of(group).error_context(lambda: what):
            raise error


@contextmanager
def collectives_named(what: str, group: Any = None) -> Iterator[None]:
    """Convert failures as `named` does. The block may also contain other operations.

    Only errors from torch's process groups are converted. An example is a lost connection in a
    reduction that DistributedDataParallel starts during the backward pass. The arguments are the
    same as for `named`.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors, which can be recognized by the source path in the message
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        with named(what, group):
            raise


@contextmanager
def refused_together(what: str, group: Any = None) -> Iterator[None]:
    """If a rank raises a `ValueError` or a `FloatingPointError` inside the block, raise the error
    on all ranks. Collective.

    A `FloatingPointError` usually occurs on one rank only, so its message names the rank.

    Args:
        what: description of the check, for the error message if the collective fails.
        group: optional. The process group. Defaults to the default group.
    """
    kinds = ValueError, FloatingPointError
    own: tuple[int, str] | None = None
    try:
        yield
    except kinds as error:
        own = isinstance(error, FloatingPointError), str(error)
    for rank, refusal in enumerate(gather_objects(own, what, group)):
        if refusal is not None:
            at, text = refusal
            raise kinds[at](f"rank {rank}: {text}" if at else text)


def gather_objects(value: Any, what: str, group: Any = None) -> list[Any]:
    """Return the values of all ranks of a group, in rank order. Collective.

    Args:
        value: this rank's value, which must be picklable.
        what: description of the values, for error messages.
        group: optional. The process group. Defaults to the default group.
    Raises:
        CommError: If the collective fails or times out.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with named(f"all_gather of {what}", group):
        dist.all_gather_object(everyone, value, group=group)
    return everyone
