"""Memory of a fixed size that may be too small, found when the step asks: an error on all ranks, or
more memory and the step once more; and one such limit: how many rows one rank sends to another at
most, where buffers have a fixed length.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.placement import Placement
from moe_plugin.config import MoEConfig
from moe_plugin.utils.machine import capturing

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
    own_N = needed_of(limits, comm.device)
    return settle(limits, torch.cat([comm.all_reduce(most_of(limits, own_N), "max"), own_N]))


def needed_of(limits: Sequence[Limit], device: torch.device) -> Tensor:
    """`needed` of N limits now, a copy: int64 [N]; 0 where a limit is not used yet."""
    own_N = torch.zeros(len(limits), dtype=torch.int64, device=device)
    for index, limit in enumerate(limits):
        if (needed := limit.needed) is not None:
            own_N[index] = needed
    return own_N


def most_of(limits: Sequence[Limit], own: Tensor) -> Tensor:
    """[..., 2 K] of the [..., N] that limits need: the most of each of K kinds, where that is an
    error and where the step is repeated.
    """
    places_N = torch.tensor([2 * _kinds().index(type(limit)) + limit.repeats for limit in limits],
                            dtype=torch.int64, device=own.device)
    most = own.new_zeros(*own.shape[:-1], 2 * len(_kinds()))
    return most.scatter_reduce(-1, places_N.expand_as(own), own, "amax")


def settle(limits: Sequence[Limit], found: Tensor) -> bool:
    """The end of `overflowed`. The host waits once.

    found: int64 [2 K + N]: `most_of` all ranks, then what each of these limits needs.
    """
    kinds = _kinds()
    found = found.tolist()
    for limit, own in zip(limits, found[2 * len(kinds):], strict=True):
        limit.grow(own) if limit.repeats and own else limit.forget()
    said = [kind.remedy.format(needed=found[2 * index]) for index, kind in enumerate(kinds)
            if found[2 * index]]
    if said:
        raise RowsOverflow(
            f"{'; '.join(said)}; or set dispatch.on_overflow to repeat. The step's outputs or "
            "gradients are NaN: nothing of it may be kept")
    return any(found[1:2 * len(kinds):2])


def _kinds() -> list[type[Limit]]:
    return sorted(Limit.__subclasses__(), key=lambda kind: kind.__name__)


class RowsLimit(Limit):
    """The bound on rows from one rank to one other, of one layer, and where it was exceeded.

    T tokens of the rank that has most, k choices, L experts of a rank, W ranks, f factor, r ranks
    to which each choice goes: min(T k, T L, ceil(f T k r / W)) rows, at least one. Nothing exceeds
    f = W / r. T L relies on a token's experts being different (`records.Routing`): of a router that
    names one twice rows may not fit, which is found as any overflow is. Rows that are sent once are
    T at most.

    Args:
        config: of the layer.
        device: of its parameters.

    Attributes:
        choices: T k; None: not agreed yet, which a call with gradients and tokens does.
        tokens: T.
        least: a bound that an overflow asked for; 0: none has.
        stashes: what backward needs is kept without filler, see `stash`.
        needed: see `Limit`; rows, equal on all ranks of the group.
    """

    remedy = ("a rank had {needed} rows for one other, more than dispatch.max_rows_factor lets "
              "through for dispatch.max_tokens tokens (0: those of the first training call); raise "
              "dispatch.max_rows_factor (none fits any load of so many tokens), or set "
              "dispatch.max_tokens to the most tokens that a rank ever has in a call")

    def __init__(self, config: MoEConfig, device: torch.device | None = None) -> None:
        dispatch = config.dispatch
        self.factor, self.repeats = dispatch.max_rows_factor, dispatch.on_overflow == "repeat"
        self.tokens = dispatch.max_tokens
        self.choices: int | None = (
            self.tokens * config.router.most_per_token(config.num_experts) or None)
        self.least, self.stashes = 0, dispatch.stash_mib > 0
        # made before any call: one that is compiled would be compiled again for another object
        self.needed = _zero(device)

    def to(self, device: torch.device) -> None:
        """Follow the layer's parameters; what was recorded is forgotten."""
        if self.needed.device != device:
            self.needed = _zero(device)

    def slots(self, ids_TK: Tensor, place: Placement) -> tuple[int, int]:
        """(the bound, T), the same on all ranks.

        Unless `dispatch.max_tokens` says T, the first call with gradients asks the ranks for it,
        by one all-reduce for which the host waits. Calls before it, and such without a token on
        any rank, ask, too, and settle nothing.

        Args:
            ids_TK: [T, k], of which the shape is looked at.
            place: of the experts.
        Raises:
            CommError: T is unknown under torch.compile or during a capture.
        """
        choices, tokens = self.choices, self.tokens
        if choices is None:
            choices, tokens = _most(ids_TK, place.comm)
            if choices and torch.is_grad_enabled():
                self.choices, self.tokens = choices, tokens
        bound = min(choices, tokens * place.local)
        if self.factor is not None:
            copies = place.copies or place.shards
            bound = min(bound, math.ceil(self.factor * choices * copies / place.comm.size))
        return max(1, bound, self.least), max(1, tokens, self.least)

    def record(self, most: Tensor, slots: int) -> Tensor:
        """Whether any rank had more rows for one rank than `slots`: a bool scalar on the device.

        most: int64 scalar, the largest number of rows of any rank for one rank.
        """
        over = most > slots
        self.to(most.device)
        # in place, so that a replayed graph writes where it is read
        self.needed.copy_(torch.maximum(self.needed, most * over))
        return over

    def grow(self, needed: int) -> None:
        self.least = max(self.least, with_room(needed))
        self.forget()

    def forget(self) -> None:
        self.needed.zero_()


def _zero(device: torch.device | None) -> Tensor:
    """An int64 scalar that every mode can write."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _zero(device)
    return torch.zeros((), dtype=torch.int64, device=device)


def _most(ids_TK: Tensor, comm: Comm) -> tuple[int, int]:
    """The most choices, and tokens, of any rank."""
    if capturing(ids_TK.device) or torch.compiler.is_compiling():
        raise comm.error("the ranks have not agreed on a number of tokens, which they cannot in a "
                         "compiled or captured call; set dispatch.max_tokens, or call the layer "
                         "once as it is, with gradients")
    own = torch.tensor([ids_TK.numel(), ids_TK.shape[0]], device=ids_TK.device)
    choices, tokens = comm.all_reduce(own, "max").tolist()
    return choices, tokens
