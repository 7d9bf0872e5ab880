"""When exchanges in the background start and are waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from moe_plugin.comm.handles import Handle
from moe_plugin.dispatch import overlap


class _Logged(Handle):
    log: list[str]

    def wait(self) -> Tensor:
        self.log.append("waited")
        return super().wait()


@contextmanager
def logged(log: list[str], **modules: nn.Module) -> Iterator[None]:
    """Append "started" and "waited" of every exchange, and a module's name when its forward or its
    backward is done.
    """
    original = overlap.start

    def start(*args: Any) -> Handle:
        log.append("started")
        handle = _Logged(original(*args).wait)
        handle.log = log
        return handle

    hooks = []
    for name, module in modules.items():
        hooks.append(module.register_forward_hook(lambda *_, name=name: log.append(name)))
        hooks.append(module.register_full_backward_hook(lambda *_, name=name: log.append(name)))
    overlap.start = start
    try:
        yield
    finally:
        overlap.start = original
        for hook in hooks:
            hook.remove()
