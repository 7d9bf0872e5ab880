"""A warning where an evaluation waits for experts that are not on the device.

Statistics files are of training, in which hosts keep experts on the device: what a store does in
an evaluation, the log alone says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from moe_plugin.layer import MoELayer
from moe_plugin.observe.health import HealthLog
from moe_plugin.offload.cache import ExpertCache
from moe_plugin.output import MoEOutput

CALLS = 4  # of a layer, that make a record
_LOGS: WeakKeyDictionary[ExpertCache, HealthLog] = WeakKeyDictionary()  # layers share a cache


def watch_store(layer: MoELayer, name: Callable[[], str]) -> None:
    """Let the layer's calls be looked at, if its experts are in a store; rank 0 alone warns.

    name: the layer's, for the log.
    """
    if not layer.experts.stored or (dist.is_initialized() and dist.get_rank() > 0):
        return
    health = _LOGS.setdefault(layer.experts.store.cache, HealthLog(unit="call"))
    seen: Counter[str] = Counter()

    def called(_module: MoELayer, _args: Any, out: MoEOutput) -> None:
        if out.stats is None:
            return
        seen.update(calls=1, **out.stats.store)
        if seen["calls"] % CALLS == 0:
            store = {key: value for key, value in seen.items() if key != "calls"}
            health.add(seen["calls"], {name(): {"calls": CALLS, "store": store}})
            for key in store:
                seen[key] = 0

    layer.register_forward_hook(called)
