"""Limits on memory of a fixed size, which a step may exceed.

Only the device knows during a step whether a limit was exceeded. At the end of the step, all ranks
check this. If a limit was exceeded, an error is raised on all ranks, or the memory is enlarged and
the step is repeated. There are two limits. `RowsLimit` limits the rows that one rank sends to
another. `dispatch.row_pages.PagedStash` limits the memory for stored rows.
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

ROOM = 1.25  # a limit that was exceeded grows to the needed size times this factor


class RowsOverflow(RuntimeError):
    """Error that is raised on all ranks if rows exceeded a limit. The results of the step are
    NaN."""


class Limit(ABC):
    """A limit on the size of rows. Only the device knows whether rows exceeded it.

    Attributes:
        remedy: the error message, which names the limit that was too small and explains how to
            enlarge it. It contains `{needed}`.
        repeats: whether a step that exceeds the limit is repeated. If `repeats` is False, exceeding
            the limit raises an error.
        needed: int64 scalar on the device, the size that would have been enough for all calls since
            the last `forget`. The value is 0 if the limit was not exceeded, and None if the limit
            has not been used yet. Calls without gradients are included, so a step or an evaluation
            calls `forget` first and checks the value at its end.
    """

    remedy: ClassVar[str]
    repeats: bool
    needed: Tensor | None

    @abstractmethod
    def grow(self, needed: int) -> None:
        """Enlarge the limit to at least `needed`, and reset `needed`."""

    @abstractmethod
    def forget(self) -> None:
        """Reset `needed`, so that it covers only later calls."""


def with_room(needed: int) -> int:
    """Return the new size of a limit for which the size `needed` was too large."""
    return math.ceil(needed * ROOM)


def overflowed(limits: Sequence[Limit], comm: Comm) -> bool:
    """Return whether a step must be repeated because rows exceeded a limit on some rank.

    Call this function after backward and before the optimizer step. The function is collective, and
    the result is equal on all ranks. The host waits for the device once. If the result is True,
    discard the gradients and repeat the step. The limits have been enlarged by then.

    Args:
        limits: the limits of the layers of this rank. May be empty.
        comm: all ranks of the model, including replicas and pipeline stages.
    Raises:
        RowsOverflow: If a limit was exceeded for which steps are not repeated. The error is raised
            on all ranks.
    """
    own_N = needed_of(limits, comm.device)
    return settle(limits, torch.cat([comm.all_reduce(most_of(limits, own_N), "max"), own_N]))


def needed_of(limits: Sequence[Limit], device: torch.device) -> Tensor:
    """Return a copy of `needed` of N limits, int64 [N]. The value is 0 for a limit that has not
    been used yet."""
    own_N = torch.zeros(len(limits), dtype=torch.int64, device=device)
    for index, limit in enumerate(limits):
        if (needed := limit.needed) is not None:
            own_N[index] = needed
    return own_N


def most_of(limits: Sequence[Limit], needs: Tensor) -> Tensor:
    """Reduce the needed sizes of N limits to the maxima for each of K classes of limits.

    Args:
        limits: N limits.
        needs: int64 [..., N], the needed size of each limit.
    Returns: int64 [..., 2 K]. For each class the maximum over limits whose overflow is an error,
        then the maximum over limits whose step is repeated.
    """
    places_N = torch.tensor([2 * _kinds().index(type(limit)) + limit.repeats for limit in limits],
                            dtype=torch.int64, device=needs.device)
    most = needs.new_zeros(*needs.shape[:-1], 2 * len(_kinds()))
    return most.scatter_reduce(-1, places_N.expand_as(needs), needs, "amax")


def settle(limits: Sequence[Limit], needs: Tensor) -> bool:
    """Enlarge or reset the limits, as the last part of `overflowed`. The host waits once.

    Args:
        limits: the limits of this rank.
        needs: int64 [2 K + N], the result of `most_of` reduced over all ranks, followed by the need
            of each limit of this rank.
    Returns: whether the step must be repeated.
    Raises:
        RowsOverflow: If a limit was exceeded for which steps are not repeated.
    """
    classes = _kinds()
    needs = needs.tolist()  # the only wait for the device
    for limit, need in zip(limits, needs[2 * len(classes):], strict=True):
        limit.grow(need) if limit.repeats and need else limit.forget()
    errors = [limit_class.remedy.format(needed=needs[2 * index])
              for index, limit_class in enumerate(classes) if needs[2 * index]]
    if errors:
        raise RowsOverflow(
            f"{'; '.join(errors)}; or set dispatch.on_overflow to repeat. The outputs or gradients "
            "of this step are NaN, so the step must be discarded")
    return any(needs[1:2 * len(classes):2])


def _kinds() -> list[type[Limit]]:
    return sorted(Limit.__subclasses__(), key=lambda kind: kind.__name__)


class RowsLimit(Limit):
    """The bound on the rows that a layer sends from one rank to another.

    The bound is min(T k, T L, ceil(f T k r / W)) rows, and at least 1. T is the largest number of
    tokens of any rank, k the number of choices per token, L the number of experts per rank, f the
    factor `dispatch.max_rows_factor`, r the number of ranks to which each choice is sent, and W the
    number of ranks. With f = W / r, no load can exceed the bound. The term T L assumes that the
    experts of a token are different (`records.Routing`). If a router chooses the same expert twice
    for a token, rows may exceed the bound, which is detected like any overflow. If rows are sent
    once per rank, there are at most T rows for each rank.

    Args:
        config: the settings of the layer.
        device: the device of its parameters.

    Attributes:
        choices: the value of T k. None until the ranks have agreed on it, in the first call with
            gradients and tokens.
        tokens: the value of T.
        least: a lower limit of the bound, set after an overflow. Initially 0.
        stashes: whether the rows needed in backward are stored in pages, without padding
            (`dispatch.row_pages`).
        needed: the bound that would have been enough; see `Limit`. The bound is equal on all ranks
            of the group.
    """

    remedy = ("a rank had {needed} rows for another rank, more than dispatch.max_rows_factor "
              "allows for dispatch.max_tokens tokens (0: the tokens of the first training call). "
              "Raise dispatch.max_rows_factor (none allows every load), or set dispatch.max_tokens "
              "to the largest number of tokens that a rank has in any call")

    def __init__(self, config: MoEConfig, device: torch.device | None = None) -> None:
        dispatch = config.dispatch
        self.factor, self.repeats = dispatch.max_rows_factor, dispatch.on_overflow == "repeat"
        self.tokens = dispatch.max_tokens
        self.choices: int | None = (
            self.tokens * config.router.most_per_token(config.num_experts) or None)
        self.least, self.stashes = 0, dispatch.stash_mib > 0
        # created before any call, because a new object would cause another compilation
        self.needed = _zero(device)

    def to(self, device: torch.device) -> None:
        """Move to the device of the layer's parameters. This resets `needed`."""
        if self.needed.device != device:
            self.needed = _zero(device)

    def slots(self, ids_TK: Tensor, place: Placement) -> tuple[int, int]:
        """Return the bound and T, which are equal on all ranks.

        Unless `dispatch.max_tokens` is set, the first call with gradients and tokens determines T
        in an all-reduce, for which the host waits. Earlier calls run the same all-reduce without
        storing T.

        Args:
            ids_TK: [T, k], the choices of this rank. Only the shape is used.
            place: the ranks that store each expert.
        Raises:
            CommError: If T is not known under `torch.compile` or while a CUDA graph is captured.
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
        # a rank without tokens needs buffers, too, because it takes part in the exchange
        return max(1, bound, self.least), max(1, tokens, self.least)

    def record(self, most: Tensor, slots: int) -> Tensor:
        """Update `needed` and return whether the rows exceeded the bound, a bool scalar on the
        device.

        Args:
            most: int64 scalar, the largest number of rows that any rank sends to a single rank.
            slots: the bound.
        """
        over = most > slots
        self.to(most.device)
        # in place, because a replayed CUDA graph writes to the memory it captured
        self.needed.copy_(torch.maximum(self.needed, most * over))
        return over

    def grow(self, needed: int) -> None:
        self.least = max(self.least, with_room(needed))
        self.forget()

    def forget(self) -> None:
        self.needed.zero_()


def _zero(device: torch.device | None) -> Tensor:
    """Return an int64 scalar tensor that can be modified inside and outside of inference mode."""
    if torch.is_inference_mode_enabled():
        # a tensor created in inference mode could not be written in training
        with torch.inference_mode(False):
            return _zero(device)
    return torch.zeros((), dtype=torch.int64, device=device)


def _most(ids_TK: Tensor, comm: Comm) -> tuple[int, int]:
    """Return the largest number of choices and of tokens of any rank."""
    if capturing(ids_TK.device) or torch.compiler.is_compiling():
        raise comm.error("the ranks have not agreed on a number of tokens yet, and they cannot do "
                         "so in a compiled or captured call. Set dispatch.max_tokens, or call the "
                         "layer once with gradients before it is compiled or captured")
    own_sizes = torch.tensor([ids_TK.numel(), ids_TK.shape[0]], device=ids_TK.device)
    choices, tokens = comm.all_reduce(own_sizes, "max").tolist()
    return choices, tokens
