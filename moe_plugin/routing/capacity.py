"""Capacity: how many rows an expert takes from one rank, and which choices get them.

T tokens of a rank, E experts, k choices, f capacity factor, s = ceil(T / E). Source: Tutel
(`fast_dispatch`).

| f | slots C per expert and source rank |
|---|---|
| none | no limit |
| f > 0 | max(1, k * int(f * s)) |
| f = 0 | the largest number of tokens that any expert got from any rank: never drops |
| f < 0 | min(the f = 0 value, max(1, k * int(-f * s))) |

Tutel has no least slot: there f < 1 drops every choice of E tokens or fewer, as in generation.

Worked example: T = 10, E = 4, k = 2 gives s = 3. f = 1: C = 6. f = 1.25: C = 2 * int(3.75) = 6. f =
0.3: C = max(1, 2 * int(0.9)) = 1. f = -1 with a largest load of 5: C = 5.
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
    """Drops choices that find no slot, with the same limit on all ranks.

    Args:
        config: of the layer.
        comm: ranks whose loads differ.
        makes_slots: whether slots are made, empty ones too: then hosts must agree on their number.
        own: each rank's limit is that of its own tokens, `HostContext.own_capacity`.

    Attributes:
        never: no choice is dropped and no weight changed, in training or outside.
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
        """The routing after capacity; see `capacity`, `limit_on_device`, `slots` and `drop`."""
        if not self.normalize and self.keeps_all(training):
            return KeptRouting(routing, None, None, routing)
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
        """Whether the settings say that no choice is dropped."""
        if training:
            return self.dispatch.capacity_factor is None
        rule = _Rule.of(self.dispatch, training)
        return rule.factor is None and not rule.fraction

    def _limit(self, routing: Routing, made: int | None, asked: Comm,
               training: bool) -> int | Tensor | None:
        """What drops: `made`, or less where only the device knows, or this rank has fewer tokens.
        """
        comm, known = self.comm, asked.size > 1
        if self.own and self.comm.size > 1:
            comm, known = self.alone, False
            made = capacity(self.dispatch, routing, self.experts, comm, training)
        limit = limit_on_device(self.dispatch, routing, self.experts, comm, training, known)
        return made if limit is None else limit

    def _checked(self, routing: Routing, training: bool) -> Routing:
        """The routing after `check_promise`, by an operation where a compiler makes a graph."""
        if torch.compiler.is_compiling():
            if self.comm.key is None:
                return routing
            return replace(routing, ids_TK=with_equal_tokens(routing.ids_TK, self.comm.key))
        if not _Rule.of(self.dispatch, training).follows_load:
            check_promise(routing.ids_TK, self.comm)
        return routing


def fixed_slots(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """max(1, k * int(|f| * ceil(T / E))), the part of the table that does not depend on the load;
    0 without a token.
    """
    each = math.trunc(abs(factor) * math.ceil(tokens / experts))
    if isinstance(tokens, int):  # torch.compile up to 2.11 takes no sym_min of what is known
        return max(min(tokens, 1), top_k * each)
    # torch.export may leave it open
    return torch.sym_max(torch.sym_min(tokens, 1), top_k * each)


@dataclass(frozen=True)
class _Rule:
    """The settings that apply: f, and the fraction of tokens in its place (0: none)."""

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
        return fixed_slots(tokens, experts, top_k, self.factor)

    def slots_on_device(self, tokens: Tensor, experts: int, top_k: int) -> Tensor:
        """`slots` of an int64 scalar, in the same float64 arithmetic."""
        if self.fraction:
            return (tokens.double() * self.fraction).ceil().long()
        each = torch.div(tokens + (experts - 1), experts, rounding_mode="floor")
        return ((each.double() * abs(self.factor)).long() * top_k).clamp(min=1)


def capacity(config: DispatchConfig, routing: Routing, experts: int, comm: Comm,
             training: bool) -> int | None:
    """Slots per expert and source rank, the same on every rank; None: nothing is dropped.

    T is the largest number of real tokens of any rank. On a CPU one all-reduce of two integers says
    it (T and, if f <= 0, the largest load). A device is not waited for: there T is the largest
    number of tokens, padding included, on which the hosts agree without it, and `limit_on_device`
    drops by the real ones. Two cases of f <= 0 remain there. In a group the load decides, and the
    host waits for it; a rank alone takes what fits any load, T (f = 0), or the f of f < 0.

    With `equal_tokens` padding counts, and nothing is asked for f > 0; see `check_promise`.

    Args:
        config: settings `dispatch`.
        routing: of this rank.
        experts: E.
        comm: ranks whose loads differ.
        training: whether the evaluation settings apply.
    """
    rule = _Rule.of(config, training)
    if rule.factor is None and not rule.fraction:
        return None
    (tokens, top_k), on_host = routing.ids_TK.shape, _on_host(routing)
    if rule.follows_load:
        if _load_unknown(rule, routing, comm):
            # a token chooses an expert once
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
    """The capacity by real tokens where the host knows but a bound, int64 scalar on the device.

    None: it is what `capacity` returns. load_known: whether that asked for the load where f <= 0;
    the other arguments are those of `capacity`.
    """
    rule = _Rule.of(config, training)
    if _on_host(routing) or (rule.factor is None and not rule.fraction):
        return None
    known = load_known or rule.factor == 0 if rule.follows_load else config.equal_tokens
    if known:
        return None
    tokens = comm.all_reduce(routing.tokens, "max") if comm.size > 1 else routing.tokens
    return rule.slots_on_device(tokens, experts, routing.ids_TK.shape[1])


def _load_unknown(rule: _Rule, routing: Routing, comm: Comm) -> bool:
    """Whether slots follow a load that the host of a lone rank would have to wait for."""
    return (rule.follows_load and comm.size == 1 and not _on_host(routing)
            and (exporting() or not torch.compiler.is_compiling()))


def _on_host(routing: Routing) -> bool:
    return routing.ids_TK.device.type == "cpu" and not exporting()


@dataclass
class _EqualTokens:
    """The number of tokens that all ranks of a group were last found to have."""

    tokens: int | None = None


def check_promise(ids_TK: Tensor, comm: Comm) -> None:
    """Check the promise `dispatch.equal_tokens`. Collective where T is another than in the last
    call.

    Raises:
        ValueError: it is broken. If T changed on some ranks only, these wait for the others until
            the group's timeout: a `CommError`.
    """
    tokens = ids_TK.shape[0]
    if comm.size == 1:
        return
    found = comm.state.get(_EqualTokens)
    if found.tokens != tokens:
        most, least = comm.hosts.all_reduce(torch.tensor([tokens, -tokens]), "max").tolist()
        if most != -least:
            raise ValueError(
                f"dispatch.equal_tokens=True is a promise that was broken: rank {comm.rank} of "
                f"{comm.size} has {tokens} tokens, must be the same on all ranks, which have "
                f"{-least} to {most}; pad the batch (token_mask), or set dispatch.equal_tokens to "
                "False")
        found.tokens = tokens


@torch.library.custom_op("moe_plugin::with_equal_tokens", mutates_args=())
def with_equal_tokens(ids_TK: Tensor, comm: str) -> Tensor:
    """A copy of ids_TK [T, K] after `check_promise`: a check that a compiler's graph keeps.

    comm: key of the group.
    """
    check_promise(ids_TK, owner_of(comm))
    return ids_TK.clone()


@with_equal_tokens.register_fake
def _(ids_TK: Tensor, comm: str) -> Tensor:
    return torch.empty_like(ids_TK)


def _agree(routing: Routing, experts: int, comm: Comm) -> tuple[int, int]:
    most = expert_load(routing.ids_TK, experts).max()
    seen_2 = comm.all_reduce(torch.stack([routing.tokens, most]), "max")
    tokens, load = seen_2.tolist()
    return tokens, load


def slots(routing: Routing, experts: int, prioritized: bool) -> Tensor:
    """Slot of each choice inside its expert, int64 [T, K]; -1 for no expert.

    First choices of all tokens come before second choices, and so on; within one choice, tokens
    come in sequence order, or by decreasing `priority_T` (stable) if `prioritized`.
    """
    if not prioritized:
        return slot_index(routing.ids_TK, experts)
    order_T = torch.argsort(routing.priority_T, descending=True, stable=True)
    sorted_TK = slot_index(routing.ids_TK[order_T], experts)
    return torch.empty_like(sorted_TK).index_copy_(0, order_T, sorted_TK)


def drop(routing: Routing, slots_TK: Tensor | None, limit: int | Tensor | None,
         normalize_after: bool, added: float = 0.0, least: float | None = None) -> Routing:
    """Remove the choices whose slot is beyond the capacity.

    Args:
        routing: before dropping.
        slots_TK: int64, see `slots`; not read without a limit.
        limit: slots per expert and source rank, a number or an int64 scalar; None: no limit.
        normalize_after: divide the remaining weights by their sum, that is, by max(sum + added,
            least) (top_k > 1). least: None: as in fairseq the dtype's epsilon, with which a token
            whose router is sure of one expert is lost with it.
    """
    if limit is None and not normalize_after:
        return routing
    keep_TK = routing.ids_TK >= 0
    if limit is not None:
        keep_TK = keep_TK & (slots_TK < limit)
    weights_TK = routing.weights_TK * keep_TK
    if normalize_after and weights_TK.shape[1] > 1:
        least = torch.finfo(weights_TK.dtype).eps if least is None else least
        weights_TK = shares_of_rest(weights_TK, added, least)
    return routing.with_kept(keep_TK, weights_TK)
