"""The registry of operations: a torch implementation each, and faster ones for some devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe_plugin.utils.registry import Registry


class Op:
    """An operation: a torch reference, decent on CPU, and implementations for devices.

    `add(name, why_not)` registers an implementation; `why_not(*args)` returns None where it can
    take these arguments, else the reason. A call uses the last added implementation that can.

    Attributes:
        interpreted: implementations for GPUs run on the CPU, in Triton's interpreter.
    """

    interpreted = False

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        self.name, self.__doc__, self._reference = name, reference.__doc__, reference
        self._others_on_cpu = False
        self._implementations: dict[
            str, tuple[Callable[..., Any], Callable[..., str | None] | None]] = {
                "torch": (reference, None)}  # None: it can take all

    def add(self, name: str, why_not: Callable[..., str | None],
            on_cpu: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that registers another implementation.

        on_cpu: it may take tensors on a CPU; False: only while `interpreted`.
        """

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            self._implementations[name] = (fn, why_not)
            self._others_on_cpu |= on_cpu
            return fn

        return register

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """What is added inside is removed at the end."""
        before = dict(self._implementations), self._others_on_cpu
        try:
            yield
        finally:
            self._implementations, self._others_on_cpu = before

    def names(self) -> list[str]:
        """Implementations, the reference first."""
        return list(self._implementations)

    def implementation(self, name: str) -> Callable[..., Any]:
        """One implementation by name."""
        if name not in self._implementations:
            raise ValueError(
                f"kernel {self.name!r} has no implementation {name!r}; it has "
                f"{', '.join(self.names())}"
            )
        return self._implementations[name][0]

    def why_not(self, name: str, *args: Any) -> str | None:
        """Why the implementation `name` cannot take these arguments; None where it can."""
        self.implementation(name)
        why_not = self._implementations[name][1]
        return None if why_not is None else why_not(*args)

    def choose(self, *args: Any) -> str:
        """Name of the implementation that these arguments get."""
        for name, (_, why_not) in reversed(self._implementations.items()):
            if why_not is None or why_not(*args) is None:
                break
        return name

    def __call__(self, *args: Any) -> Any:
        # the first argument is a tensor, and all are on its device
        if args[0].device.type == "cpu" and not (self._others_on_cpu or Op.interpreted):
            return self._reference(*args)
        return self._implementations[self.choose(*args)][0](*args)


kernels: Registry[Op] = Registry("kernel")


def op(fn: Callable[..., Any]) -> Op:
    """Decorator: make the torch reference `fn` an operation of its name."""
    made = Op(fn.__name__, fn)
    kernels.register(fn.__name__)(made)
    return made


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64 inputs."""
    # not `promote_types`, which costs as much as an operation
    return dtype if dtype == torch.float64 else torch.float32
