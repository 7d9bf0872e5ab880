"""Limits on buffers of a fixed size that a step may exceed.

During a step, only the device knows whether a limit was exceeded. At the end of the step, all ranks
check whether a limit was exceeded. If a limit was exceeded, either all ranks raise an error, or the
limit is raised and the step is repeated. `RowsLimit` limits the number of rows that one rank sends
to another. `dispatch.row_pages.PagedStash` limits the memory for rows of the backward pass.
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
    """Raised by all ranks if rows on any rank exceeded a limit. Outputs and gradients are NaN."""


class Limit(ABC):
    """A limit on the number of rows, or on the memory that stores them. Only the device knows
    whether the limit was exceeded.

    Attributes:
        remedy: error message. The message names the limit that was exceeded and explains how to
            raise it. It contains `{needed}`.
        repeats: True if a step that exceeds the limit is repeated. If `repeats` is False, exceeding
            the limit raises an error.
        needed: int64 scalar on the device, the size that would have been sufficient for all calls
            since the last `forget`. `needed` is 0 if the limit was not exceeded, and None if the
            limit has not been used yet. Calls without gradients are included. A step or an
            evaluation should therefore call `forget` at its start and check `needed` at its end.
    """

    remedy: ClassVar[str]
    repeats: bool
    needed: Tensor | None

    @abstractmethod
    def grow(self, needed: int) -> None:
        """Raise the limit to at least `needed`, then reset the `needed` attribute."""

    @abstractmethod
    def forget(self) -> None:
        """Reset the `needed` attribute, so that it describes only later calls."""


def with_room(needed: int) -> int:
    """Return the new limit for a step that needs the size `needed`, with some headroom."""
    return math.ceil(needed * ROOM)


def overflowed(limits: Sequence[Limit], comm: Comm) -> bool:
    """Return whether the step must be repeated because rows on any rank exceeded a limit.

    Call this function after the backward pass and before the optimizer step. The function is
    collective and returns the same answer on all ranks. The host waits once for the device. If the
    function returns True, discard the gradients and repeat the step. In this case, the limits have
    already been raised.

    Args:
        limits: limits of the layers on this rank. May be empty.
        comm: group of all ranks of the model, including replicas and pipeline stages.
    Raises:
        RowsOverflow: If a limit was exceeded and its steps are not repeated. All ranks raise this
            error.
    """
    own_N = needed_of(limits, comm.device)
    return settle(limits, torch.cat([comm.all_reduce(most_of(limits, own_N), "max"), own_N]))


def needed_of(limits: Sequence[Limit], device: torch.device) -> Tensor:
    """Return a copy of the `needed` attribute of N limits, int64 [N]. For a limit that has not been
    used yet, the returned element is 0.
    """
    own_N = torch.zeros(len(limits), dtype=torch.int64, device=device)
    for index, limit in enumerate(limits):
        if (needed := limit.needed) is not None:
            own_N[index] = needed
    return own_N


def most_of(limits: Sequence[Limit], needs: Tensor) -> Tensor:
    """Compute the maximum needed size for each of K classes of limits.

    Args:
        limits: N limits.
        needs: int64 [..., N], the needed size for each limit.
    Returns: The maxima, int64 [..., 2 K]. Each class has two maxima: first the maximum over limits
        that raise an error, and then the maximum over limits that repeat the step.
    """
    places_N = torch.tensor([2 * _kinds().index(type(limit)) + limit.repeats for limit in limits],
                            dtype=torch.int64, device=needs.device)
    most = needs.new_zeros(*needs.shape[:-1], 2 * len(_kinds()))
    return most.scatter_reduce(-1, places_N.expand_as(needs), needs, "amax")


def settle(limits: Sequence[Limit], needs: Tensor) -> bool:
    """Raise or reset the limits as the last step of `overflowed`. The host waits once for the
    device.

    Args:
        limits: limits on this rank.
        needs: int64 [2 K + N]. The first 2 K elements are the maxima computed by `most_of`, reduced
            over all ranks. The other elements are the needed sizes for the limits on this rank.
    Returns: Whether the step must be repeated.
    Raises:
        RowsOverflow: If a limit was exceeded and its steps are not repeated.
    """
    classes = _kinds()
    counts: list[int] = needs.tolist()  # the only wait for the device
    for limit, need in zip(limits, counts[2 * len(classes):], strict=True):
        limit.grow(need) if limit.repeats and need else limit.forget()
    errors = [limit_class.remedy.format(needed=counts[2 * index])
              for index, limit_class in enumerate(classes) if counts[2 * index]]
    if errors:
        raise RowsOverflow(
            f"{'; '.join(errors)}; or set dispatch.on_overflow to repeat. The outputs or gradients "
            "of this step are NaN, so the step must be discarded")
    return any(counts[1:2 * len(classes):2])


def _kinds() -> list[type[Limit]]:
    return sorted(Limit.__subclasses__(), key=lambda kind: kind.__name__)


class RowsLimit(Limit):
    """The limit on the number of rows that a layer sends from one rank to another.

    The limit is min(T k, T L, ceil(f T k r / W)) rows, but at least 1. Here, T is the largest
    number of tokens on any rank, k is the number of choices per token, L is the number of experts
    per rank, f is `dispatch.max_rows_factor`, r is the number of ranks to which each choice is
    sent, and W is the number of ranks. With f = W / r, no load can exceed the limit. The term T L
    assumes that no token has the same expert twice (`records.Routing`). If a router does choose the
    same expert twice for a token, the rows may exceed the limit, which is detected like any other
    overflow. If a token's row is sent only once per rank, at most T rows are sent to each rank.

    Args:
        config: dispatch settings of the layer.
        device: device of the layer's parameters.

    Attributes:
        choices: largest number of choices on any rank, T k. `choices` is None until the ranks have
            agreed on the number in the first call with gradients and tokens.
        tokens: largest number of tokens on any rank, T.
        least: minimum value of the limit, which is set after an overflow. Initially 0.
        stashes: True if the rows needed in the backward pass are stored in pages without padding
            (`dispatch.row_pages`).
        needed: limit that would have been sufficient; see `Limit`. All ranks of the group have the
            same limit.
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
        self.needed: Tensor = _zero(device)

    def to(self, device: torch.device) -> None:
        """Move the limit to the device of the layer's parameters. This resets `needed`."""
        if self.needed.device != device:
            self.needed = _zero(device)

    def slots(self, ids_TK: Tensor, place: Placement) -> tuple[int, int]:
        """Return the limit on rows and the number of tokens T. Both numbers are equal on all ranks.

        Unless `dispatch.max_tokens` is set, the first call with gradients and tokens determines T
        with an all-reduce. The host waits for the all-reduce of T. Earlier calls run the same
        all-reduce, but do not store T.

        Args:
            ids_TK: [T, k], the choices on this rank. Only the shape of `ids_TK` is used.
            place: the ranks that store each expert.
        Raises:
            CommError: If T is still unknown when the call is compiled by `torch.compile` or
                captured in a CUDA graph.
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
        """Update `needed`. The method returns a bool scalar on the device that is True if the rows
        exceeded the limit.

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
    """Return an int64 scalar tensor that can be modified both inside and outside inference mode."""
    if torch.is_inference_mode_enabled():
        # a tensor created in inference mode could not be written in training
        with torch.inference_mode(False):
            return _zero(device)
    return torch.zeros((), dtype=torch.int64, device=device)


def _most(ids_TK: Tensor, comm: Comm) -> tuple[int, int]:
    """Return the largest number of routing choices and the largest number of tokens on any rank."""
    if capturing(ids_TK.device) or torch.compiler.is_compiling():
        raise comm.error("the ranks have not agreed on a number of tokens yet, and they cannot do "
                         "so in a compiled or captured call. Set dispatch.max_tokens, or call the "
                         "layer once with gradients before it is compiled or captured")
    own_sizes = torch.tensor([ids_TK.numel(), ids_TK.shape[0]], device=ids_TK.device)
    choices, tokens = comm.all_reduce(own_sizes, "max").tolist()
    return choices, tokens
