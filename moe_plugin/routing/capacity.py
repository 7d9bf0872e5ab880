"""The capacity is the number of rows that an expert accepts from one rank. Each accepted choice
occupies one slot of its expert.

Notation: T is the number of tokens on a rank, E the number of experts, k the number of choices per
token, f the capacity factor, and s = ceil(T / E).
Source: Tutel (`fast_dispatch`).

| f | slots C per expert and source rank |
|---|---|
| none | no limit |
| f > 0 | max(1, k * int(f * s)) |
| f = 0 | the largest number of tokens that any expert received from any rank: never drops |
| f < 0 | min(the f = 0 value, max(1, k * int(-f * s))) |

Tutel's formula does not guarantee at least one slot. With Tutel's formula and f < 1, all choices
are dropped if a rank has at most E tokens. Such small batches are common during generation.

For example, s = 3 for T = 10, E = 4 and k = 2. In this case, f = 1 results in C = 6. With f = 1.25,
C = 2 * int(3.75) = 6. With f = 0.3, C = max(1, 2 * int(0.9)) = 1. With f = -1 and a largest load of
5, C = 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm, LocalComm
from moe_plugin.comm.group import owner_of
from moe_plugin.config import DispatchConfig, MoEConfig
from moe_plugin.kernels import expert_load, slot_index
from moe_plugin.kernels.scores import shares_of_rest
from moe_plugin.records import KeptRouting, Routing
from moe_plugin.utils.machine import exporting


class CapacityLimit:
    """A module that drops the routing choices for which an expert has no free slot. All ranks use
    the same limit.

    Args:
        config: configuration of the layer.
        comm: group of ranks over which the capacity is determined.
        makes_slots: True if the dispatcher sends slots, including empty slots. If `makes_slots` is
            True, all ranks must agree on the number of slots.
        own: True if each rank computes the limit from its own tokens; see
            `HostContext.own_capacity`.

    Attributes:
        never: True if choices are never dropped and weights are never changed, neither in training
            nor in evaluation.
    """

    def __init__(self, config: MoEConfig, comm: Comm, makes_slots: bool = True,
                 own: bool = False) -> None:
        self.dispatch, self.experts, self.comm = config.dispatch, config.num_experts, comm
        self.makes_slots, self.alone, self.own = makes_slots, LocalComm(), own
        self.prioritized = config.router.batch_prioritized
        self.normalize = config.router.normalize == "after_drop"
        self.added, self.least = config.router.normalize_add, config.router.normalize_min
        self.never = not self.normalize and self.keeps_all(True) and self.keeps_all(False)

    def __call__(self, routing: Routing, training: bool) -> KeptRouting:
        """Return the routing after dropping the choices that exceed the capacity; see `capacity`,
        `limit_on_device`, `slots` and `drop`.
        """
        if not self.normalize and self.keeps_all(training):
            return KeptRouting(routing, None, None, routing)
        # Without slots nothing on the host depends on the number, so that the host of a GPU does
        # not wait for the other ranks; `limit_on_device` then applies the group's limit.
        asked = self.comm if self.makes_slots or _on_host(routing) else self.alone
        made = capacity(self.dispatch, routing, self.experts, asked, training)
        if made is not None and self.dispatch.equal_tokens:
            routing = self._checked(routing, training)
        slots_TK = None if made is None else slots(routing, self.experts, self.prioritized)
        kept = drop(routing, slots_TK, self._limit(routing, made, asked, training),
                    self.normalize, self.added, self.least)
        rule = _Rule.of(self.dispatch, training)
        any_load = rule.factor == 0 and _load_unknown(rule, routing, asked)
        return KeptRouting(kept, slots_TK, made, routing, any_load)

    def keeps_all(self, training: bool) -> bool:
        """Return whether the settings guarantee that no choice is dropped."""
        if training:
            return self.dispatch.capacity_factor is None
        rule = _Rule.of(self.dispatch, training)
        return rule.factor is None and not rule.fraction

    def _limit(self, routing: Routing, made: int | None, asked: Comm,
               training: bool) -> int | Tensor | None:
        """Return the number of slots per expert beyond which routing choices are dropped.

        The limit is usually equal to `made`. It is lower in two cases: only the device knows the
        number of real tokens, or this rank uses its own limit and has fewer tokens than other
        ranks.
        """
        comm, known = self.comm, asked.size > 1
        if self.own and self.comm.size > 1:
            comm, known = self.alone, False
            made = capacity(self.dispatch, routing, self.experts, comm, training)
        limit = limit_on_device(self.dispatch, routing, self.experts, comm, training, known)
        return made if limit is None else limit

    def _checked(self, routing: Routing, training: bool) -> Routing:
        """Check that all ranks have the same number of tokens, as `dispatch.equal_tokens` promises,
        and return the routing.

        Under a compiler, the check must be an operation in the graph. As plain Python code, the
        check would run only once.
        """
        if torch.compiler.is_compiling():
            if self.comm.key is None:
                return routing
            return replace(routing, ids_TK=with_equal_tokens(routing.ids_TK, self.comm.key))
        if not _Rule.of(self.dispatch, training).follows_load:
            check_promise(routing.ids_TK, self.comm)
        return routing


def fixed_slots(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """Return `max(1, k * int(|f| * ceil(T / E)))` slots, or 0 if the rank has no tokens."""
    # Truncated before the multiplication by k, as in Tutel.
    slots_per_choice = math.trunc(abs(factor) * math.ceil(tokens / experts))
    if isinstance(tokens, int):  # torch.compile up to 2.11 rejects sym_min of known integers
        return max(min(tokens, 1), top_k * slots_per_choice)
    # torch.export may leave the number of tokens symbolic.
    return torch.sym_max(torch.sym_min(tokens, 1), top_k * slots_per_choice)


@dataclass(frozen=True)
class _Rule:
    """The capacity settings that apply to one call: the capacity factor, and the fraction of tokens
    that replaces the factor. The fraction is 0 if the capacity factor is used.
    """

    factor: float | None
    fraction: float

    @classmethod
    def of(cls, config: DispatchConfig, training: bool) -> _Rule:
        if training:
            return cls(config.capacity_factor, 0.0)
        factor = config.eval_capacity_factor
        return cls(config.capacity_factor if factor is None else factor,
                   config.eval_token_fraction)

    @property
    def follows_load(self) -> bool:
        return not self.fraction and self.factor is not None and self.factor <= 0

    def slots(self, tokens: int, experts: int, top_k: int) -> int:
        if self.fraction:
            return math.ceil(self.fraction * tokens)
        assert self.factor is not None
        return fixed_slots(tokens, experts, top_k, self.factor)

    def slots_on_device(self, tokens: Tensor, experts: int, top_k: int) -> Tensor:
        """Compute the same number as `slots`, but from an int64 scalar tensor. The arithmetic is in
        float64, as on the host.
        """
        if self.fraction:
            return (tokens.double() * self.fraction).ceil().long()
        assert self.factor is not None
        slots_per_choice = torch.div(tokens + (experts - 1), experts, rounding_mode="floor")
        return ((slots_per_choice.double() * abs(self.factor)).long() * top_k).clamp(min=1)


def capacity(config: DispatchConfig, routing: Routing, experts: int, comm: Comm,
             training: bool) -> int | None:
    """Return the number of slots per expert and source rank, which is the same on all ranks, or
    None if no choice is dropped.

     In the formulas, T is the largest number of real tokens on any rank. On a CPU, a single
    all-reduce of two integers determines T and, if f <= 0, the largest load of any expert. On a
    GPU, the host does not wait for the device. On a GPU, T therefore includes padding. The ranks
    can agree on the number of tokens including padding without waiting for the device.
    `limit_on_device` then drops choices based on the number of real tokens.

    On a GPU, there are two cases for f <= 0. In a group of several ranks, the number of slots
    depends on the load, so the host waits for the load. A single rank uses enough slots for any
    load, that is, T slots if f = 0. If f < 0, a single rank uses the number of slots that the
    factor -f gives.

    With `equal_tokens`, padding tokens are counted like real tokens, and f > 0 requires no
    communication; see `check_promise`.

    Args:
        config: settings `dispatch`.
        routing: choices and weights of the tokens on this rank.
        experts: number of experts, E.
        comm: group of ranks over which the capacity is determined.
        training: True if the layer is in training mode. If `training` is False, the settings for
            evaluation apply.
    """
    rule = _Rule.of(config, training)
    if rule.factor is None and not rule.fraction:
        return None
    (tokens, top_k), on_host = routing.ids_TK.shape, _on_host(routing)
    if rule.follows_load:
        if _load_unknown(rule, routing, comm):
            # T slots always suffice, because a token chooses an expert at most once.
            return rule.slots(tokens, experts, top_k) if rule.factor else tokens
        tokens, load = _agree(routing, experts, comm)
        return load if rule.factor == 0 else min(load, rule.slots(tokens, experts, top_k))
    if not config.equal_tokens and on_host:
        tokens, _ = _agree(routing, experts, comm)
    elif not config.equal_tokens and comm.size > 1:
        tokens = int(comm.hosts.all_reduce(torch.tensor([tokens]), "max"))
    return rule.slots(tokens, experts, top_k)


def limit_on_device(config: DispatchConfig, routing: Routing, experts: int, comm: Comm,
                    training: bool, load_known: bool) -> Tensor | None:
    """Return the capacity for the number of real tokens, int64 scalar on the device, or None.

    If the function returns None, the number returned by `capacity` is already exact.

    Args:
        config: settings `dispatch`.
        routing: choices and weights of this rank's tokens.
        experts: number of experts, E.
        comm: group of ranks that have different loads.
        training: True if the layer is in training mode.
        load_known: True if f <= 0 and `capacity` has already exchanged the loads.
    """
    rule = _Rule.of(config, training)
    if _on_host(routing) or (rule.factor is None and not rule.fraction):
        return None
    # For f = 0 the capacity never drops a choice, so a bound is as good as the exact number.
    known = load_known or rule.factor == 0 if rule.follows_load else config.equal_tokens
    if known:
        return None
    tokens = comm.all_reduce(routing.tokens, "max") if comm.size > 1 else routing.tokens
    return rule.slots_on_device(tokens, experts, routing.ids_TK.shape[1])


def _load_unknown(rule: _Rule, routing: Routing, comm: Comm) -> bool:
    """Return whether a single rank would have to wait for the device to obtain the load that
    determines the number of slots.
    """
    return (rule.follows_load and comm.size == 1 and not _on_host(routing)
            and (exporting() or not torch.compiler.is_compiling()))


def _on_host(routing: Routing) -> bool:
    return routing.ids_TK.device.type == "cpu" and not exporting()


@dataclass
class _EqualTokens:
    """The number of tokens that the ranks of a group agreed on in the last check."""

    tokens: int | None = None


def check_promise(ids_TK: Tensor, comm: Comm) -> None:
    """Check that all ranks have the same number of tokens, as promised by `dispatch.equal_tokens`.

    If T differs from its value in the previous call, the check is collective.

    Raises:
        ValueError: If the ranks have different numbers of tokens. If T changed on some ranks only,
            these ranks wait for the other ranks and raise a `CommError` after the group's timeout.
    """
    tokens = ids_TK.shape[0]
    if comm.size == 1:
        return
    checked = comm.state.get(_EqualTokens)
    if checked.tokens != tokens:
        # The maximum of (T, -T) finds the largest and the smallest number in one all-reduce.
        most, least = comm.hosts.all_reduce(torch.tensor([tokens, -tokens]), "max").tolist()
        if most != -least:
            raise ValueError(
                f"dispatch.equal_tokens=True requires the same number of tokens on all ranks, but "
                f"rank {comm.rank} of {comm.size} has {tokens} tokens and the ranks have "
                f"{-least} to {most}. Pad the batch (token_mask), or set dispatch.equal_tokens to "
                "False.")
        checked.tokens = tokens


@torch.library.custom_op("moe_plugin::with_equal_tokens", mutates_args=())
def with_equal_tokens(ids_TK: Tensor, comm: str) -> Tensor:
    """Call `check_promise`, and return a copy of `ids_TK` [T, K].

    The function is a torch operation, so that a compiler includes the check in its graph.

    Args:
        comm: key that identifies the communication group.
    """
    check_promise(ids_TK, owner_of(comm))
    return ids_TK.clone()


@with_equal_tokens.register_fake
def _(ids_TK: Tensor, comm: str) -> Tensor:
    return torch.empty_like(ids_TK)


def _agree(routing: Routing, experts: int, comm: Comm) -> tuple[int, int]:
    most = expert_load(routing.ids_TK, experts).max()
    # One all-reduce for both numbers, and one wait for the device.
    seen_2 = comm.all_reduce(torch.stack([routing.tokens, most]), "max")
    tokens, load = seen_2.tolist()
    return tokens, load


def slots(routing: Routing, experts: int, prioritized: bool) -> Tensor:
    """Return the slot of each routing choice within its expert, int64 [T, K], or -1 for a choice
    without an expert.

    The first choices of all tokens get the first slots, followed by all second choices, and so on.
    Within the j-th choices, tokens get slots in sequence order. If `prioritized` is true, tokens
    get slots in the order of decreasing `priority_T` instead (using a stable sort).
    """
    if not prioritized:
        return slot_index(routing.ids_TK, experts)
    assert routing.priority_T is not None
    # Slots are counted in the order of priority and then returned to the order of tokens.
    order_T = torch.argsort(routing.priority_T, descending=True, stable=True)
    sorted_TK = slot_index(routing.ids_TK[order_T], experts)
    return torch.empty_like(sorted_TK).index_copy_(0, order_T, sorted_TK)


def drop(routing: Routing, slots_TK: Tensor | None, limit: int | Tensor | None,
         normalize_after: bool, added: float = 0.0, least: float | None = None) -> Routing:
    """Remove the routing choices whose slots exceed the capacity.

    Args:
        routing: routing before choices are dropped.
        slots_TK: int64 [T, K], the slot of each choice; see `slots`. Unused if `limit` is None.
        limit: maximum number of slots per expert and source rank, as an integer or an int64 scalar
            tensor, or None for no limit.
        normalize_after: True if the remaining weights of tokens with several choices are divided by
            `max(sum + added, least)`.
        added: number added to the sum of the weights before the division.
        least: smallest divisor. Defaults to the epsilon of the dtype, as in fairseq. With the
            default of `least`, the output of a token is almost 0 if the router assigns almost the
            whole weight to one expert and this choice is dropped.
    """
    if limit is None and not normalize_after:
        return routing
    keep_TK = routing.ids_TK >= 0
    if limit is not None:
        assert slots_TK is not None
        keep_TK = keep_TK & (slots_TK < limit)
    weights_TK = routing.weights_TK * keep_TK
    if normalize_after and weights_TK.shape[1] > 1:
        least = torch.finfo(weights_TK.dtype).eps if least is None else least
        weights_TK = shares_of_rest(weights_TK, added, least)
    return routing.with_kept(keep_TK, weights_TK)
