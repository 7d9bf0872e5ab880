"""When exchanges in the background start and are waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from moe_plugin.comm.handles import Series
from moe_plugin.dispatch import exchange as overlap


@contextmanager
def logged(log: list[str], **modules: nn.Module) -> Iterator[None]:
    """Append "started" and "waited" of every exchange, and a module's name when its forward or its
    backward is done.
    """
    class Logged(Series):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.numbers: list[int] = []

        def put(self, number: int, x: Tensor) -> None:
            log.append("started")
            # the receives of all are posted in this order, which is that on the links
            assert number == len(self.numbers), "exchanges are put in by their number"
            self.numbers.append(number)
            super().put(number, x)

        def take(self, number: int) -> Tensor:
            log.append("waited")
            return super().take(number)

    hooks = []
    for name, module in modules.items():
        hooks.append(module.register_forward_hook(lambda *_, name=name: log.append(name)))
        hooks.append(module.register_full_backward_hook(lambda *_, name=name: log.append(name)))
    overlap.Series = Logged
    try:
        yield
    finally:
        overlap.Series = Series
        for hook in hooks:
            hook.remove()
