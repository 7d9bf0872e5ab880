"""A cache of experts on the device, and policies that choose which experts to evict. The experts of
several layers share the slots of the cache.

An expert that is in use is pinned, so it cannot be evicted. An expert can be used only after its
copy to the slot is complete.
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

Key = tuple[int, int]  # number of a layer in the cache, local expert


class CachePolicy:
    """A policy that chooses which expert to evict. The cache reports every use to its policy.

    Policies do not depend on wall-clock time, so runs are reproducible. A subclass must override
    `worth` or `victim`. A subclass that does not maintain `last` must override `used` and `victim`.

    Attributes:
        last: for each expert in a slot, the sequence number of its last use. All uses of all
            experts are numbered consecutively.
        counts: number of uses of each expert, including uses before the expert was last evicted.
    """

    def __init__(self) -> None:
        self._uses, self.last = 0, dict[Key, int]()
        self.counts: Counter[Key] = Counter()

    def used(self, key: Key) -> None:
        """Record that an expert is used, or that it was loaded for use."""
        self._uses += 1
        self.last[key] = self._uses
        self.counts[key] += 1

    def left(self, key: Key) -> None:
        """Record that an expert was evicted."""
        # subclasses may lack `last`, or store something else in it
        last = getattr(self, "last", None)
        if isinstance(last, dict):
            last.pop(key, None)

    def victim(self, keys: Collection[Key], layer: int, layers: int) -> Key:
        """Choose one of `keys`, which identify experts, for eviction. `layer` is the number of the
        layer that needs a slot, and `layers` is the total number of layers.
        """
        return min(keys, key=lambda key: (self.worth(key, layer, layers), self.last[key]))

    def worth(self, key: Key, layer: int, layers: int) -> Any:
        """Return a score that indicates how useful it is to keep an expert in the cache. The expert
        with the lowest score is evicted. Among experts with equal scores, the least recently used
        expert is evicted.
        """
        raise NotImplementedError


def _check_policy(name: str, policy: type[CachePolicy]) -> None:
    if policy.worth is CachePolicy.worth and policy.victim is CachePolicy.victim:
        raise ValueError(f"cache_policy {name!r} does not choose which expert is evicted: "
                         f"{policy.__name__} must override `worth` or `victim`")


policies: Registry[type[CachePolicy]] = Registry("cache_policy", base=CachePolicy,
                                                 check=_check_policy)


@policies.register("lru")
class LeastRecentlyUsed(CachePolicy):
    """A policy that evicts the least recently used expert."""

    def worth(self, key: Key, layer: int, layers: int) -> int:
        return 0


@policies.register("lfu")
class LeastFrequentlyUsed(CachePolicy):
    """A policy that evicts the expert with the fewest uses, and breaks ties by evicting the least
    recently used expert. The number of uses includes uses before an earlier eviction, so frequently
    used experts tend to stay in the cache.
    """

    def worth(self, key: Key, layer: int, layers: int) -> int:
        return self.counts[key]


@policies.register("next-layer")
class NextLayer(CachePolicy):
    """A policy that evicts an expert of the layer computed last, counting from the current layer.

    Layers are computed in a fixed cyclic order, so the experts of the current layer will not be
    needed again until all other layers have been computed.
    """

    def worth(self, key: Key, layer: int, layers: int) -> int:
        return -((key[0] - layer - 1) % layers)


@dataclass
class StoreCounters:
    """Cache statistics for one layer.

    Attributes:
        hits, misses: number of requested experts that were already in a slot or being copied to a
            slot, and number of all other requested experts.
        prefetched: number of experts that were loaded before a call requested them.
        wasted: number of prefetched experts that were evicted before their first use.
        stalls: number of uses that had to wait for a copy. A call that computes its experts in
            several groups counts as several uses.
        bytes: number of bytes loaded from the tier.
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
    """The properties of a cache. Layers with equal specifications share one cache.

    Attributes:
        shapes: pairs of a parameter's name and the shape of the parameter for a single expert.
        dtype, device: dtype and device of the slots.
        limit: maximum total size of all slots in bytes. If `limit` is 0, the cache has twice as
            many slots as the largest number of experts used by one call.
        policy: registered name of the cache policy.
        throttle: maximum bandwidth of the tier in bytes per second, or None for no limit.
        rank: index of this rank in the expert-parallel group.
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
    """A cache that contains slots on the device for the experts of all layers of a process.

    Raises:
        ValueError: If the limit is smaller than one expert in 4 bits, or if the policy is unknown.
            If one expert is larger than the limit, its first use raises the same error.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec, self.copier = spec, Copier(spec.device, spec.throttle)
        # `freeze_experts` may replace the weights by codes of 4 bits before the first call
        if spec.limit and spec.limit < spec.expert_bytes // (2 * spec.dtype.itemsize):
            raise self._small_error()
        self.policy: CachePolicy = policies.get(spec.policy)()
        self.buffers: dict[str, Tensor] = {}
        self.slots = self.layers = self.experts = 0
        self._lock = threading.RLock()
        self._slot: dict[Key, int] = {}
        self._ticket: dict[Key, Ticket] = {}
        # prefetched, not used yet: counters of the layer
        self._early: dict[Key, StoreCounters] = {}
        self._pins: Counter[Key] = Counter()
        self._free: list[int] = []

    def add_layer(self, experts: int) -> int:
        """Add a layer and return its number. Layers should be computed in ascending order."""
        with self._lock:
            self.layers, self.experts = self.layers + 1, self.experts + experts
            return self.layers - 1

    def drop_layer(self, layer: int, experts: int) -> None:
        """Remove a layer."""
        self.forget(layer)
        self.experts -= experts

    def room(self, experts: int) -> int:
        """Return how many experts of a call can be in slots at the same time, which is at least 1.

        Raises:
            ValueError: If other calls use all slots.
        """
        with self._lock:
            self._grow(max(1, experts))
            room = min(experts, self.slots - len(self._pins))
            if experts and room < 1:
                raise self._full_error()
            return room

    @contextmanager
    def use(self, layer: int, experts: Sequence[int], fetch: Fetch,
            counters: StoreCounters) -> Iterator[list[int]]:
        """Load experts of a layer, and yield the indices of their slots.

        The experts stay pinned until the context ends.

        Args:
            layer: number of the layer.
            experts: distinct indices of experts. `experts` may contain at most `room` experts.
            fetch: function that starts filling slots, given a list of pairs. Each pair consists of
                an expert and the slices of all buffers that belong to the expert's slot.
            counters: cache statistics of the layer, which this method updates.
        """
        keys = [(layer, expert) for expert in experts]
        with self._lock:
            num_in_slots = sum(key in self._slot for key in keys)
            counters.hits, counters.misses = (counters.hits + num_in_slots,
                                              counters.misses + len(keys) - num_in_slots)
            self._grow(max(1, len(keys)))
            # pinned before they are loaded, so that loading one expert does not evict another of
            # the call
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
        """If slots are available, start loading experts that a later call may request.

        See `use` for the arguments.
        """
        with self._lock:
            self._grow(len(experts))
            self._bring([(layer, expert) for expert in experts], fetch, counters, early=True)

    def forget(self, layer: int) -> None:
        """Evict a layer's unpinned experts, because their stored parameters have changed."""
        with self._lock:
            for key in [key for key in self._slot if key[0] == layer and not self._pins[key]]:
                self._leave(key)

    def resident(self, layer: int) -> list[int]:
        """Return the experts of a layer that are in slots or that are being copied to slots."""
        with self._lock:
            return sorted(expert for of, expert in self._slot if of == layer)

    @property
    def nbytes(self) -> int:
        """Total size of the slots in bytes."""
        return self.slots * self.spec.expert_bytes

    @property
    def resident_bytes(self) -> int:
        """Total size in bytes of the experts in slots or being copied to slots."""
        return len(self._slot) * self.spec.expert_bytes

    def _bring(self, keys: Sequence[Key], fetch: Fetch, counters: StoreCounters,
               early: bool) -> None:
        missing: list[Key] = []
        try:
            for key in keys:
                if key not in self._slot:
                    # a prefetch must not evict experts of the same prefetch; experts of a call are
                    # pinned
                    slot = self._take_slot(key[0], keys if early else ())
                    if slot is None and early:
                        break
                    if slot is None:
                        raise self._full_error()
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
        """Return an empty slot, after evicting an expert if necessary, or None."""
        if not self._free:
            keys = [key for key in self._slot if not self._pins[key] and key not in keep]
            if not keys:
                return None
            self._leave(self.policy.victim(keys, layer, self.layers))
        return self._free.pop(0)

    def _leave(self, key: Key) -> None:
        """Evict an expert. If a copy into the expert's slot is still running, the next copy starts
        only after it has ended.
        """
        self._ticket.pop(key, None)
        early = self._early.pop(key, None)
        if early is not None:
            early.wasted += 1
        self._free.append(self._slot.pop(key))
        self.policy.left(key)

    def _small_error(self) -> ValueError:
        return ValueError(
            f"experts.cache={show_size(self.spec.limit)} is too small for one expert: it must be "
            f">= {self.spec.expert_bytes} bytes, or 0 for twice the number of experts that a call "
            "uses")

    def _full_error(self) -> ValueError:
        if self.spec.limit and self.spec.limit < self.spec.expert_bytes:
            return self._small_error()
        return ValueError(
            f"experts.cache={show_size(self.spec.limit)} has {self.slots} slots of "
            f"{self.spec.expert_bytes} bytes, and all of them are in use, but one more is needed; "
            "raise experts.cache")

    def _unpin(self, keys: Sequence[Key]) -> None:
        self._pins.subtract(keys)
        # removes entries that are 0
        self._pins += Counter()

    def _wait(self, tickets: Sequence[Ticket], counters: StoreCounters) -> None:
        """Wait for all copies, and raise the first error. Experts whose copy failed are evicted."""
        counters.stalls += not all(ticket.done for ticket in tickets)
        errors = []
        for ticket in tickets:
            try:
                ticket.wait()
            except BaseException as error:  # noqa: BLE001 - any error, raised below
                errors.append(error)
                with self._lock:
                    for key in [key for key, of in self._ticket.items() if of is ticket]:
                        self._leave(key)
        if errors:
            raise errors[0]

    def _grow(self, experts: int) -> None:
        """Create more slots for a call with `experts` experts, up to the limit."""
        slots = 2 * experts
        if self.spec.limit:
            slots = self.spec.limit // self.spec.expert_bytes
        slots = min(slots, self.experts)
        # new buffers would move experts that are in use
        if slots <= self.slots or self._pins:
            return
        for key in list(self._slot):
            self._leave(key)
        self.buffers = {}  # frees the old buffers before the new ones are allocated
        self.buffers = {name: torch.empty(slots, *shape, dtype=self.spec.dtype,
                                          device=self.spec.device)
                        for name, shape in self.spec.shapes}
        self.slots, self._free = slots, list(range(slots))


# Layers of a model do not reference each other but share a cache, which lives as long as one of
# them.
_CACHES: weakref.WeakValueDictionary[CacheSpec, ExpertCache] = weakref.WeakValueDictionary()


def shared_cache(spec: CacheSpec) -> ExpertCache:
    """Return the cache shared by all layers of this process with this specification."""
    cache: Any = _CACHES.get(spec)
    if cache is None:
        cache = _CACHES[spec] = ExpertCache(spec)
    return cache
