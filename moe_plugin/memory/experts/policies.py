"""Which expert leaves a cache that is full, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from moe_plugin.registry import Registry

Key = tuple[int, int]  # number of a layer among those of the cache, expert of this rank


class CachePolicy:
    """Chooses who leaves; sees every use. Nothing in it depends on time, so runs repeat.

    Attributes:
        last: of each expert in a slot, the number of its last use. counts: uses of all experts,
            those before they left included.
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
        del self.last[key]

    def victim(self, keys: Collection[Key], layer: int, layers: int) -> Key:
        """One of `keys`, at least one, to leave for an expert of `layer` of `layers`."""
        return min(keys, key=lambda key: (self.worth(key, layer, layers), self.last[key]))

    def worth(self, key: Key, layer: int, layers: int) -> Any:
        """The expert of least worth leaves; of several, that of the oldest use."""
        return 0


policies: Registry[type[CachePolicy]] = Registry("cache_policy", base=CachePolicy)


@policies.register("lru")
class LeastRecentlyUsed(CachePolicy):
    """The expert whose last use is longest ago leaves."""


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
