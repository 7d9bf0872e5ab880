"""Whether all ranks of a group called the same collectives in the same order.

On NCCL two ranks that call in another order wait for each other forever, or add up what does not
belong together; on gloo such a fault may pass. Each rank notes its calls of `torch.distributed`,
by group, and what must be equal of them: the operation, the dtype, the number of elements. The
harness of the test compares them when all ranks have ended; no rank sends anything for it. So does
`Server.run`.

A test that expects a collective to fail, and ends well, is not compared in that group. Not seen:
messages between two ranks, collectives in C++ (DDP's own) and in graphs, and those that a host has
taken from torch by name before its ranks were forked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fake_gpu.events import project_lines

# of each collective the argument whose dtype, and elements, must be the same; empty: none
_TENSOR = {
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor", "reduce_scatter_tensor": "input",
    "all_gather_single": "input_tensor", "reduce_scatter_single": "input",
    "all_to_all_single": "input", "barrier": "", "all_gather_object": "",
    "broadcast_object_list": "", "gather_object": "",
}
_UNEVEN = ("all_to_all_single", "all_gather")  # ranks may have other numbers of elements
Group = tuple[tuple[int, ...], str]  # global ranks, torch's name


@dataclass(frozen=True)
class Call:
    """A collective. alike: what must be equal on all ranks. where: the project's lines."""

    name: str
    alike: tuple[Any, ...]
    where: str

    def __str__(self) -> str:
        return f"{self.name}{' of ' * bool(self.alike)}{' '.join(self.alike)} ({self.where})"


@dataclass
class Calls:
    """What one rank called, by group, and the groups of which a call failed."""

    of: dict[Group, list[Call]] = field(default_factory=dict)
    failed: set[Group] = field(default_factory=set)


def noted() -> Calls:
    """The calls of this process from now on."""
    import torch.distributed as dist

    calls = Calls()
    for name, tensor in _TENSOR.items():
        if not hasattr(dist, name):  # of another version
            continue
        setattr(dist, name, _seen(calls, name, getattr(dist, name), tensor))
    return calls


def _seen(calls: Calls, name: str, function: Callable[..., Any],
          tensor: str) -> Callable[..., Any]:
    import torch.distributed as dist

    bind = inspect.signature(function).bind_partial

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = bind(*args, **kwargs).arguments
        group = given.get("group") or dist.group.WORLD
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            return function(*args, **kwargs)
        key = tuple(dist.get_process_group_ranks(group)), group.group_name
        alike = () if tensor not in given else _alike(name, given[tensor])
        calls.of.setdefault(key, []).append(Call(name, alike, project_lines()))
        try:
            made = function(*args, **kwargs)
        except BaseException:
            calls.failed.add(key)
            raise
        return made if made is None else _Work(made, lambda: calls.failed.add(key))

    return call


def _alike(name: str, x: Any) -> tuple[str, ...]:
    return (str(x.dtype),) if name in _UNEVEN else (str(x.dtype), f"[{x.numel()}]")


class _Work:
    """What a collective returned that was begun; its wait may fail."""

    def __init__(self, work: Any, failed: Callable[[], object]) -> None:
        self._work, self._failed = work, failed

    def wait(self, *args: Any) -> Any:
        try:
            return self._work.wait(*args)
        except BaseException:
            self._failed()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def first_difference(by_rank: Sequence[Calls | None], well: bool = True) -> str:
    """The first call of a group in which its ranks differ; empty: none, or a rank noted nothing.

    well: all ranks ended well; False: one failed, and calls after that are not compared.
    """
    if any(calls is None for calls in by_rank):
        return ""
    failed = {group for calls in by_rank for group in calls.failed} if well else set()
    groups = {group: None for calls in by_rank for group in calls.of if group not in failed}
    return next((found for group in groups if (found := _difference(group, by_rank, well))),
                "")


def _difference(group: Group, by_rank: Sequence[Calls], well: bool) -> str:
    ranks = [rank for rank in group[0] if rank < len(by_rank)]
    lists = [by_rank[rank].of.get(group, []) for rank in ranks]
    for number in range((max if well else min)(map(len, lists))):
        here = {rank: each[number] if number < len(each) else None
                for rank, each in zip(ranks, lists, strict=True)}
        if len({call and (call.name, call.alike) for call in here.values()}) > 1:
            said = "\n".join(f"  rank {rank}: {call or 'no more'}" for rank, call in here.items())
            return (f"call {number + 1} of group {group[1]!r} of ranks {list(group[0])} is not the "
                    f"same on all of them:\n{said}")
    return ""
