"""The registry of operations. Each operation has a torch implementation, and some devices have
faster implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe_plugin.utils.registry import Registry


class Op:
    """An operation with a torch reference and optional faster implementations. The reference is
    also used on CPUs.

    `add(name, why_not)` registers an implementation. The function `why_not(*args)` returns None if
    the implementation supports these arguments, and otherwise the reason why it does not. A call
    uses the most recently added implementation that supports the arguments.

    Attributes:
        interpreted: whether GPU implementations run on the CPU in Triton's interpreter.
    """

    interpreted = False

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        self.name, self.__doc__, self._reference = name, reference.__doc__, reference
        self._others_on_cpu = False
        self._implementations: dict[
            str, tuple[Callable[..., Any], Callable[..., str | None] | None]] = {
                "torch": (reference, None)}  # None: supports all arguments

    def add(self, name: str, why_not: Callable[..., str | None],
            on_cpu: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that registers a function as an additional implementation.

        on_cpu: whether the implementation supports tensors on a CPU. If `on_cpu` is False, the
        implementation receives CPU tensors only while `interpreted` is set.
        """

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            self._implementations[name] = (fn, why_not)
            self._others_on_cpu |= on_cpu
            return fn

        return register

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Context manager that removes, on exit, all implementations that were added inside it."""
        before = dict(self._implementations), self._others_on_cpu
        try:
            yield
        finally:
            self._implementations, self._others_on_cpu = before

    def names(self) -> list[str]:
        """Return the names of all implementations. The reference implementation is first."""
        return list(self._implementations)

    def implementation(self, name: str) -> Callable[..., Any]:
        """Return the implementation that is registered under `name`."""
        if name not in self._implementations:
            raise ValueError(
                f"The kernel {self.name!r} has no implementation {name!r}. Available "
                f"implementations: {', '.join(self.names())}."
            )
        return self._implementations[name][0]

    def why_not(self, name: str, *args: Any) -> str | None:
        """Return the reason why the implementation `name` does not support these arguments, or None
        if they are supported.
        """
        self.implementation(name)
        why_not = self._implementations[name][1]
        return None if why_not is None else why_not(*args)

    def choose(self, *args: Any) -> str:
        """Return the name of the implementation that a call with these arguments uses."""
        # The last candidate is the torch reference, which supports all arguments.
        for name, (_, why_not) in reversed(self._implementations.items()):
            if why_not is None or why_not(*args) is None:
                break
        return name

    def __call__(self, *args: Any) -> Any:
        # The first argument is a tensor on the device of all tensors. This shortcut skips all
        # `why_not` checks for tensors on a CPU.
        if args[0].device.type == "cpu" and not (self._others_on_cpu or Op.interpreted):
            return self._reference(*args)
        return self._implementations[self.choose(*args)][0](*args)


kernels: Registry[Op] = Registry("kernel")


def op(fn: Callable[..., Any]) -> Op:
    """Register the decorated torch reference as an operation, under the name of the function."""
    operation = Op(fn.__name__, fn)
    kernels.register(fn.__name__)(operation)
    return operation


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are accumulated: float32, or float64 for float64 inputs."""
    # `promote_types` would take as long as a whole operation.
    return dtype if dtype == torch.float64 else torch.float32
