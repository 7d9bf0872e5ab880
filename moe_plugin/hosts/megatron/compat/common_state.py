"""Modify the common state of a distributed checkpoint while Megatron loads the checkpoint."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PACKAGE = "megatron.core.dist_checkpointing"
Change = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def changed(change: Change, strategy_given: bool) -> Iterator[dict[str, Any]]:
    """Inside the block, make `dist_checkpointing.load` use the common state that `change` returns.

    `load` must be called with the keyword arguments that this context manager yields.

    Up to Megatron 0.17, a strategy object loads the common state. From Megatron 0.18 on, the common
    state is loaded by a function in the module that defines `load`. The function is named
    `load_common` in Megatron 0.18 and `load_common_state_dict` in Megatron 0.19.

    strategy_given: True if the caller passes its own strategy to `load`. If True, `change` has no
        effect up to Megatron 0.17.
    """
    common = importlib.import_module(f"{_PACKAGE}.strategies.common")
    base = getattr(common, "TorchCommonLoadStrategy", None)  # absent from 0.18 on
    if base is not None:
        yield {} if strategy_given else {"common_strategy": _strategy(base, change)}
        return
    module = importlib.import_module(f"{_PACKAGE}.serialization")
    names = module.load.__code__.co_names
    name = "load_common_state_dict" if "load_common_state_dict" in names else "load_common"
    original = getattr(module, name)
    setattr(module, name, lambda folder: change(original(folder)))
    try:
        yield {}
    finally:
        setattr(module, name, original)


def _strategy(base: type, change: Change) -> Any:

    class Changed(base):  # type: ignore[misc]

        def load_common(self, checkpoint_dir: Any) -> Any:
            return change(super().load_common(checkpoint_dir))

    return Changed()
