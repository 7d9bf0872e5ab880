"""The registry of all-to-all algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from moe_plugin.comm.base import Exchange, FunctionExchange
from moe_plugin.registry import Registry

Algorithm = TypeVar("Algorithm", bound=Callable[..., Any])


class ExchangeRegistry(Registry[Exchange]):
    """All-to-all algorithms by name: `Exchange` objects, or plain functions, which become one."""

    def register(self, name: str, *, direct: bool = False,
                 **options: Any) -> Callable[[Algorithm], Algorithm]:
        """Decorator: `@algorithms.register("mine")` on a function `(comm, x, send, recv) -> rows`.

        It returns what it decorates; `get` returns the `Exchange`. direct: see `Exchange`.
        Raises: ValueError: the name is taken. TypeError: neither an `Exchange` nor a function.
        """
        add = super().register(name, **options)

        def checked(value: Algorithm) -> Algorithm:
            if isinstance(value, type) or not callable(value):
                raise TypeError(f"all_to_all {name!r} is {value!r}; register an Exchange object or "
                                "a function (comm, x, send, recv) -> rows")
            add(value if isinstance(value, Exchange) else FunctionExchange(
                value, name if direct else None))
            return value

        return checked


algorithms = ExchangeRegistry("all_to_all")
