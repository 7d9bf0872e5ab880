"""A warning where an evaluation waits for experts that are not on the device.

Statistics files are of training, in which hosts keep experts on the device: what a store does in
an evaluation, the log alone says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from moe_plugin.layer import MoELayer
from moe_plugin.memory.experts.cache import ExpertCache
from moe_plugin.observe.health import HealthLog
from moe_plugin.output import MoEOutput

CALLS = 2  # of each layer, that make a record


class StoreLog:
    """Takes what a store did in each call of the layers that share it, and warns."""

    def __init__(self) -> None:
        self._health, self._calls = HealthLog(unit="call"), 0
        self._seen: dict[str, Counter[str]] = {}

    def add(self, layer: str, store: Mapping[str, int]) -> None:
        """Take a call. The first layer's begins a record: all layers speak at the same time."""
        if layer == next(iter(self._seen), None) and self._seen[layer]["calls"] == CALLS:
            self._record()
        self._seen.setdefault(layer, Counter()).update(calls=1, **store)

    def _record(self) -> None:
        self._calls += CALLS
        records = {}
        for layer, seen in self._seen.items():
            records[layer] = {"calls": seen.pop("calls", 0), "store": dict(seen)}
            seen.clear()
        self._health.add(self._calls, records)


_LOGS: WeakKeyDictionary[ExpertCache, StoreLog] = WeakKeyDictionary()  # layers share a cache


def watch_store(layer: MoELayer, name: Callable[[], str]) -> None:
    """Let the layer's calls be looked at, if its experts are in a store; rank 0 alone warns.

    name: the layer's, for the log.
    """
    if not layer.experts.stored or (dist.is_initialized() and dist.get_rank() > 0):
        return
    log = _LOGS.setdefault(layer.experts.store.cache, StoreLog())

    def called(_module: MoELayer, _args: Any, out: MoEOutput) -> None:
        if out.stats is not None:
            log.add(name(), out.stats.store)

    layer.register_forward_hook(called)
