"""Utilities for tensors: parameters that are sharded by FSDP2, data classes as pytrees, and
conversions to floating-point dtypes of at least 32 bits.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor, serialization
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor.

    The DTensor module is not imported for this check, because importing it is slow; if it has not
    been imported, there are no DTensors.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def sharded_as(whole: Tensor, like: DTensor) -> DTensor:
    """Shard a full tensor in the same way as `like`, which must have the same shape. This function
    is collective: all ranks receive shards of rank 0's tensor.
    """
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)


@torch.no_grad()
def fill_(parameter: Tensor, whole: Tensor) -> None:
    """Copy a full tensor into a parameter. This function is collective if the parameter is sharded.
    """
    if is_sharded(parameter):
        parameter.to_local().copy_(sharded_as(whole, parameter).to_local())
    else:
        parameter.copy_(whole)


def xavier_(weight_ED: Tensor) -> None:
    """Initialize `weight_ED` from a Xavier uniform distribution. The values are drawn in float32.
    """
    bound = (6 / sum(weight_ED.shape)) ** 0.5
    fill_(weight_ED, torch.empty(weight_ED.shape, dtype=torch.float32).uniform_(-bound, bound))


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


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for floating-point dtypes with fewer than 32 bits, and the given dtype
    otherwise.
    """
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def keep_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a function for `Module._apply`, so that floating-point results with fewer than 32 bits
    become float32.
    """

    def apply(tensor: Tensor) -> Tensor:
        made = fn(tensor)
        dtype = at_least_float32(made.dtype)
        return made if made.dtype == dtype else tensor.to(made.device, dtype)

    return apply
