"""Memory of a fixed size that was too small, found when the step asks: an error on all ranks, or
more memory and the step once more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm

ROOM = 1.25  # what was too small becomes what was needed, and this much more


class RowsOverflow(RuntimeError):
    """Rows did not fit; what the step computed from them is NaN. Raised on all ranks."""


class Limit(ABC):
    """A size that rows must fit in, and whether they did, which the device alone knows.

    Attributes:
        remedy: what was too small and what to do, with `{needed}`.
        repeats: a step in which rows did not fit is repeated; False: it is an error.
        needed: int64 scalar on the device: the size that would have been enough, since the last
            `forget`; 0: it was enough; None: not used yet. Calls without gradients count, too: a
            step or an evaluation forgets first, and asks at its end.
    """

    remedy: ClassVar[str]
    repeats: bool
    needed: Tensor | None

    @abstractmethod
    def grow(self, needed: int) -> None:
        """Have room for `needed` from now on, and forget."""

    @abstractmethod
    def forget(self) -> None:
        """From now on, `needed` is of later calls."""


def with_room(needed: int) -> int:
    """The size that follows one which was too small for `needed`."""
    return math.ceil(needed * ROOM)


def overflowed(limits: Sequence[Limit], comm: Comm) -> bool:
    """Whether a step is to be repeated: rows did not fit somewhere since the last time it was
    asked. The same on all ranks.

    The host waits once; call it after backward and before the optimizer. Limits that repeat have
    grown afterwards: discard the gradients and repeat the step.

    Args:
        limits: of a model's layers; a rank without such layers passes none.
        comm: all ranks of the model, replicas and pipeline stages included. They all call it.
    Raises:
        RowsOverflow: on all ranks, where a limit that does not repeat was exceeded.
    """
    kinds = sorted(Limit.__subclasses__(), key=lambda kind: kind.__name__)
    limits = [limit for limit in limits if limit.needed is not None]
    # by kind, where that is an error and where the step is repeated
    most_K2 = torch.zeros(len(kinds), 2, dtype=torch.int64, device=comm.device)
    own_N = most_K2.new_zeros(len(limits))
    for index, limit in enumerate(limits):
        own_N[index] = limit.needed
        most_2 = most_K2[kinds.index(type(limit))]
        most_2[int(limit.repeats)] = torch.maximum(most_2[int(limit.repeats)], own_N[index])
    found = torch.cat([comm.all_reduce(most_K2, "max").view(-1), own_N]).tolist()
    needed = found[2 * len(kinds):]
    for limit, own in zip(limits, needed, strict=True):
        limit.grow(own) if limit.repeats and own else limit.forget()
    said = [kind.remedy.format(needed=found[2 * index]) for index, kind in enumerate(kinds)
            if found[2 * index]]
    if said:
        raise RowsOverflow(
            f"{'; '.join(said)}; or set dispatch.on_overflow to repeat. The step's outputs or "
            "gradients are NaN: nothing of it may be kept")
    return any(found[1:2 * len(kinds):2])
