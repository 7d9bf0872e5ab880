"""A device buffer of slots for experts of several layers, and who leaves it when it is full.

An expert in a slot is pinned while it is in use: it cannot leave. It is given out only when its
copy is complete.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.planner.units import show_size
from moe_plugin.utils.registry import Registry

Key = tuple[int, int]  # number of a layer among those of the cache, expert of this rank


class CachePolicy:
    """Chooses who leaves; sees every use. Nothing in it depends on time, so runs repeat.

    A policy has `worth` or `victim` of its own. One that keeps no `last` has `used` and `victim`.

    Attributes:
        last: of each expert in a slot, the number of its last use.
        counts: uses of all experts, those before they left included.
    """

    def __init__(self) -> None:
        self._uses, self.last = 0, dict[Key, int]()
        self.counts: Counter[Key] = Counter()

    def used(self, key: Key) -> None:
        """An expert is used, or was brought to be used."""
        self._uses += 1
        self.last[key] = self._uses
        self.counts[key] += 1

    def left(self, key: Key) -> None:
        """An expert has left."""
        last = getattr(self, "last", None)  # what keeps none, or its own, counts otherwise
        if isinstance(last, dict):
            last.pop(key, None)

    def victim(self, keys: Collection[Key], layer: int, layers: int) -> Key:
        """One of `keys`, at least one, to leave for an expert of `layer` of `layers`."""
        return min(keys, key=lambda key: (self.worth(key, layer, layers), self.last[key]))

    def worth(self, key: Key, layer: int, layers: int) -> Any:
        """The expert of least worth leaves; of several, that of the oldest use."""
        raise NotImplementedError


def _check_policy(name: str, policy: type[CachePolicy]) -> None:
    if policy.worth is CachePolicy.worth and policy.victim is CachePolicy.victim:
        raise ValueError(f"cache_policy {name!r} does not say who leaves: {policy.__name__} must "
                         "have `worth` or `victim`")


policies: Registry[type[CachePolicy]] = Registry("cache_policy", base=CachePolicy,
                                                 check=_check_policy)


@policies.register("lru")
class LeastRecentlyUsed(CachePolicy):
    """The expert whose last use is longest ago leaves."""

    def worth(self, key: Key, layer: int, layers: int) -> int:
        return 0


@policies.register("lfu")
class LeastFrequentlyUsed(CachePolicy):
    """The expert with the fewest uses of all leaves; of several, that of the oldest use.

    Uses before an expert left count, too: an expert that is popular all in all stays.
    """

    def worth(self, key: Key, layer: int, layers: int) -> int:
        return self.counts[key]


@policies.register("next-layer")
class NextLayer(CachePolicy):
    """An expert of the layer that computes last from now on leaves.

    Layers compute in order, again and again: this layer's own experts are needed last.
    """

    def worth(self, key: Key, layer: int, layers: int) -> int:
        return -((key[0] - layer - 1) % layers)


@dataclass
class StoreCounters:
    """What the cache did for one layer.

    Attributes:
        hits, misses: experts that a call found in a slot, or on their way to one, and others.
        prefetched: experts that were brought before a call asked for them.
        wasted: those of them that left without being used.
        stalls: uses that waited for a copy; a call that computes in parts has several.
        bytes: that came from the tier.
    """

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    wasted: int = 0
    stalls: int = 0
    bytes: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


Fetch = Callable[[Sequence[tuple[int, Mapping[str, Tensor]]]], Ticket]


@dataclass(frozen=True)
class CacheSpec:
    """What makes layers share a cache: all of it must be equal.

    Attributes:
        shapes: (name, shape of one expert's part) of each parameter.
        dtype, device: of the slots.
        limit: bytes of all slots; 0: twice the most experts that a call of a layer uses.
        policy: by registered name.
        throttle: bytes/s of the tier; None: none.
        rank: of the expert-parallel group.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: torch.dtype
    device: torch.device
    limit: int = 0
    policy: str = "lru"
    throttle: float | None = None
    rank: int = 0

    @property
    def expert_bytes(self) -> int:
        return self.dtype.itemsize * sum(torch.Size(shape).numel() for _, shape in self.shapes)


class ExpertCache:
    """Slots for experts of the layers of a process. `ValueError`: the limit is below one expert, or
    the policy is unknown.
    """

    def __init__(self, spec: CacheSpec) -> None:
        if spec.limit and spec.limit < spec.expert_bytes:
            raise ValueError(
                f"experts.cache={show_size(spec.limit)} does not hold one expert: must be >= "
                f"{spec.expert_bytes} bytes, or 0 for twice the most that a call uses")
        self.spec, self.copier = spec, Copier(spec.device, spec.throttle)
        self.policy: CachePolicy = policies.get(spec.policy)()
        self.buffers: dict[str, Tensor] = {}
        self.slots = self.layers = self.experts = 0
        self._lock = threading.RLock()
        self._slot: dict[Key, int] = {}
        self._ticket: dict[Key, Ticket] = {}
        self._early: dict[Key, StoreCounters] = {}  # prefetched and not used yet, of whom
        self._pins: Counter[Key] = Counter()
        self._free: list[int] = []

    def add_layer(self, experts: int) -> int:
        """A number for one more layer with so many experts; layers compute in order of numbers."""
        with self._lock:
            self.layers, self.experts = self.layers + 1, self.experts + experts
            return self.layers - 1

    def drop_layer(self, layer: int, experts: int) -> None:
        """A layer is gone."""
        self.forget(layer)
        self.experts -= experts

    def room(self, experts: int) -> int:
        """Of so many experts of a call, how many it can use at a time; at least one. `ValueError`:
        other calls use all slots.
        """
        with self._lock:
            self._grow(max(1, experts))
            room = min(experts, self.slots - len(self._pins))
            if experts and room < 1:
                raise self._full()
            return room

    @contextmanager
    def use(self, layer: int, experts: Sequence[int], fetch: Fetch,
            counters: StoreCounters) -> Iterator[list[int]]:
        """The slots of a layer's experts, whose values are there, and stay there inside.

        Args:
            experts: different ones, at most `room`.
            fetch: starts to fill slots: [(expert, its part of each buffer)].
            counters: of the layer.
        """
        keys = [(layer, expert) for expert in experts]
        with self._lock:
            there = sum(key in self._slot for key in keys)
            counters.hits, counters.misses = (counters.hits + there,
                                              counters.misses + len(keys) - there)
            self._grow(max(1, len(keys)))
            self._pins.update(keys)
            try:
                self._bring(keys, fetch, counters, early=False)
            except BaseException:
                self._unpin(keys)
                raise
            for key in keys:
                self._early.pop(key, None)
            tickets = {id(self._ticket[key]): self._ticket[key] for key in keys}
            slots = [self._slot[key] for key in keys]
        try:
            self._wait(list(tickets.values()), counters)
            yield slots
        finally:
            with self._lock:
                self._unpin(keys)

    def prefetch(self, layer: int, experts: Sequence[int], fetch: Fetch,
                 counters: StoreCounters) -> None:
        """Start to bring experts of which a later call may ask; those for which there is no slot
        are left out. See `use`.
        """
        with self._lock:
            self._grow(len(experts))
            self._bring([(layer, expert) for expert in experts], fetch, counters, early=True)

    def forget(self, layer: int) -> None:
        """A layer's experts have changed in their tier; none of them is in use."""
        with self._lock:
            for key in [key for key in self._slot if key[0] == layer and not self._pins[key]]:
                self._leave(key)

    def resident(self, layer: int) -> list[int]:
        """Experts of a layer that are in slots, or on their way."""
        with self._lock:
            return sorted(expert for of, expert in self._slot if of == layer)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self.slots * self.spec.expert_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the experts of all layers that are in slots, or on their way."""
        return len(self._slot) * self.spec.expert_bytes

    def _bring(self, keys: Sequence[Key], fetch: Fetch, counters: StoreCounters,
               early: bool) -> None:
        """Start to copy what is not there, in one job."""
        missing: list[Key] = []
        try:
            for key in keys:
                if key not in self._slot:
                    slot = self._take_slot(key[0], keys if early else ())
                    if slot is None and early:
                        break
                    if slot is None:
                        raise self._full()
                    self._slot[key] = slot
                    missing.append(key)
                self.policy.used(key)
            if not missing:
                return
            ticket = fetch([(key[1], {name: buffer[self._slot[key]]
                                      for name, buffer in self.buffers.items()})
                            for key in missing])
        except BaseException:
            for key in missing:
                self._leave(key)
            raise
        self._ticket.update(dict.fromkeys(missing, ticket))
        counters.bytes += ticket.nbytes
        if early:
            self._early.update(dict.fromkeys(missing, counters))
            counters.prefetched += len(missing)

    def _take_slot(self, layer: int, keep: Collection[Key]) -> int | None:
        """A slot without an expert; None: what is in them must stay."""
        if not self._free:
            keys = [key for key in self._slot if not self._pins[key] and key not in keep]
            if not keys:
                return None
            self._leave(self.policy.victim(keys, layer, self.layers))
        return self._free.pop(0)

    def _leave(self, key: Key) -> None:
        """A copy into the slot that is under way ends before the next one into it begins."""
        self._ticket.pop(key, None)
        early = self._early.pop(key, None)
        if early is not None:
            early.wasted += 1
        self._free.append(self._slot.pop(key))
        self.policy.left(key)

    def _full(self) -> ValueError:
        return ValueError(
            f"experts.cache={show_size(self.spec.limit)} has {self.slots} slots of "
            f"{self.spec.expert_bytes} bytes, all of them in use: must hold one more; raise it")

    def _unpin(self, keys: Sequence[Key]) -> None:
        self._pins.subtract(keys)
        self._pins += Counter()

    def _wait(self, tickets: Sequence[Ticket], counters: StoreCounters) -> None:
        """Wait for all; raises the first error. What could not be copied has left."""
        counters.stalls += not all(ticket.done for ticket in tickets)
        errors = []
        for ticket in tickets:
            try:
                ticket.wait()
            except BaseException as error:  # noqa: BLE001 - of any kind; raised below
                errors.append(error)
                with self._lock:
                    for key in [key for key, of in self._ticket.items() if of is ticket]:
                        self._leave(key)
        if errors:
            raise errors[0]

    def _grow(self, experts: int) -> None:
        """Make slots for a call of so many experts, where the limit allows more."""
        slots = 2 * experts
        if self.spec.limit:
            slots = self.spec.limit // self.spec.expert_bytes
        slots = min(slots, self.experts)
        if slots <= self.slots or self._pins:
            return
        for key in list(self._slot):
            self._leave(key)
        self.buffers = {}  # before the new ones
        self.buffers = {name: torch.empty(slots, *shape, dtype=self.spec.dtype,
                                          device=self.spec.device)
                        for name, shape in self.spec.shapes}
        self.slots, self._free = slots, list(range(slots))


# Layers of a model know nothing of each other, and share a cache: it lives as long as one of them.
_CACHES: weakref.WeakValueDictionary[CacheSpec, ExpertCache] = weakref.WeakValueDictionary()


def shared_cache(spec: CacheSpec) -> ExpertCache:
    """The cache of this process for layers of one kind."""
    cache: Any = _CACHES.get(spec)
    if cache is None:
        cache = _CACHES[spec] = ExpertCache(spec)
    return cache
