"""Register data classes as pytrees, so that `torch.export` and wrappers such as FSDP2 can traverse
their fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from torch import serialization
from torch.utils import _pytree

T = TypeVar("T")


def as_pytree(*static: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that registers a data class as a pytree. The leaves of the pytree are the
    values of the fields, in order.

    Args:
        static: names of fields that contain plain values rather than tensors. The values of these
            fields are part of the pytree's structure and are not leaves. Strings must not be
            leaves, because `torch.export` cannot load a program that returns a string.
    """
    def register(cls: type[T]) -> type[T]:
        names = [field.name for field in dataclasses.fields(cls)  # type: ignore[arg-type]
                 if field.name not in static]

        def context(value: Any) -> list[Any] | None:
            return [getattr(value, name) for name in static] if static else None

        def flatten(value: Any) -> tuple[list[Any], list[Any] | None]:
            return [getattr(value, name) for name in names], context(value)

        def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], list[Any] | None]:
            leaves = [(_pytree.GetAttrKey(name), getattr(value, name)) for name in names]
            return leaves, context(value)

        def unflatten(values: Any, fixed: list[Any] | None) -> T:
            return cls(**dict(zip(names, values, strict=True)),
                       **dict(zip(static, fixed or (), strict=True)))

        _pytree.register_pytree_node(
            cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys,
            serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
        # `torch.export.load` reads example arguments with `weights_only`. Creating an instance of a
        # data class runs no code, so it is safe to allow.
        serialization.add_safe_globals([cls])
        return cls

    return register
