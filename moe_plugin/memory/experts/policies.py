"""Which expert leaves a cache that is full, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection

from moe_plugin.registry import Registry

Key = tuple[int, int]  # number of a layer among those of the cache, expert of this rank


class CachePolicy(ABC):
    """Chooses who leaves; sees every use. Nothing in it depends on time, so runs repeat."""

    @abstractmethod
    def used(self, key: Key) -> None:
        """An expert is used, or was brought to be used."""

    @abstractmethod
    def victim(self, keys: Collection[Key], layer: int, layers: int) -> Key:
        """One of `keys`, at least one, to leave for an expert of `layer` of `layers`."""

    def left(self, key: Key) -> None:
        """An expert has left."""


policies: Registry[type[CachePolicy]] = Registry("cache_policy", base=CachePolicy)


@policies.register("lru")
class LeastRecentlyUsed(CachePolicy):
    """The expert whose last use is longest ago leaves."""

    def __init__(self) -> None:
        self._uses, self._last = 0, {}

    def used(self, key: Key) -> None:
        self._uses += 1
        self._last[key] = self._uses

    def victim(self, keys: Collection[Key], layer: int, layers: int) -> Key:
        return min(keys, key=self._last.__getitem__)

    def left(self, key: Key) -> None:
        del self._last[key]


@policies.register("lfu")
class LeastFrequentlyUsed(LeastRecentlyUsed):
    """The expert with the fewest uses of all leaves; of several, that of the oldest use.

    Uses before an expert left count, too: an expert that is popular all in all stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[Key] = Counter()

    def used(self, key: Key) -> None:
        super().used(key)
        self._counts[key] += 1

    def victim(self, keys: Collection[Key], layer: int, layers: int) -> Key:
        return min(keys, key=lambda key: (self._counts[key], self._last[key]))


@policies.register("next-layer")
class NextLayer(LeastRecentlyUsed):
    """An expert of the layer that computes last from now on leaves.

    Layers compute in order, again and again: this layer's own experts are needed last.
    """

    def victim(self, keys: Collection[Key], layer: int, layers: int) -> Key:
        return min(keys, key=lambda key: (-((key[0] - layer - 1) % layers), self._last[key]))
