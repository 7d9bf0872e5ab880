"""Compute norms of many tensors, and scale many tensors, at once, with apex if possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.training.gradients import fused
from moe_plugin.training.gradients.part_gradients import plain
from moe_plugin.utils.tensors import is_sharded

# devices and dtypes for which every release of apex has kernels
APEX_DEVICES, APEX_DTYPES = ("cuda",), (torch.float32, torch.float16)


@torch.no_grad()
def squared_norm(tensors: Sequence[Tensor], device: torch.device | None = None,
                 copies: Sequence[int] | None = None) -> Tensor:
    """Return the sum of the squares of all elements of all tensors, as a 0-dim float64 tensor.

    The host does not wait for the device. The norm of each tensor is computed in float32 (float64
    for float64 tensors). If any tensor contains NaN or Inf, the sum is NaN or Inf.

    Args:
        tensors: tensors with any shapes, floating-point dtypes and devices. If there are no
            tensors, the sum is 0. For a DTensor, only the shard on this rank is included.
        device: optional. Device of the returned tensor. Defaults to the device of the first tensor.
        copies: optional. For each tensor, the number of ranks that store the same tensor. The
            squares of the tensor are divided by this number. Defaults to 1 for every tensor.
    """
    norms = SquaredNorm()
    norms.add(0, tensors, copies)
    return norms.total(device or (tensors[0].device if tensors else torch.device("cpu")))


class SquaredNorm:
    """Computes `squared_norm` for tensors that are not all in memory at the same time.

    The result is bitwise equal to that of `squared_norm`. The exception is a GPU with apex, because
    apex computes the norms of several tensors at once.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, tuple[torch.device, torch.dtype], Tensor]]] = {}

    @torch.no_grad()
    def add(self, place: int, tensors: Sequence[Tensor], copies: Sequence[int] | None = None
            ) -> None:
        """Add the squares of some of the tensors to the sum.

        Args:
            place: position in the order of summation. Calls may be in any order.
            tensors: see `squared_norm`.
            copies: see `squared_norm`.
        """
        copies = [1] * len(tensors) if copies is None else copies
        part = self._parts[place] = []
        for count in sorted(set(copies)):
            chosen = [x for x, n in zip(tensors, copies, strict=True) if n == count]
            part += [(count, (group[0].device, group[0].dtype), _norms(group))
                     for group in _by_device_and_dtype(chosen)]

    @torch.no_grad()
    def total(self, device: torch.device) -> Tensor:
        """Return the sum of squares so far, 0-dim float64 on `device`; see `squared_norm`."""
        alike: dict[int, dict[tuple[torch.device, torch.dtype], list[Tensor]]] = {}
        for index in sorted(self._parts):
            for count, kind, norms_N in self._parts[index]:
                alike.setdefault(count, {}).setdefault(kind, []).append(norms_N)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for count in sorted(alike):
            for norms in alike[count].values():
                total += torch.cat(norms).double().square().sum().to(device) / count
        return total


def _norms(group: list[Tensor]) -> Tensor:
    """Return the norms [n] of tensors with one device and dtype, or one norm [1] of all of them."""
    if (norm_op := _apex(fused.L2_NORM, group)) is not None:
        return norm_op([group], False)[0].reshape(-1)
    precision = torch.promote_types(group[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(group, 2, dtype=precision))


@torch.no_grad()
def scale_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply all tensors by a factor in place.

    Args:
        tensors: tensors or DTensors with any shapes, floating-point dtypes and devices.
        factor: number or 0-dim tensor by which the tensors are multiplied. apex is used only if
            `factor` is a Python number. For a tensor, apex would wait for its value.
    """
    for group in _by_device_and_dtype(tensors):
        if isinstance(factor, Tensor):
            torch._foreach_mul_(group, factor.to(group[0].device))
        elif (scale_op := _apex(fused.SCALE, group)) is not None:
            scale_op([group, group], factor)
        else:
            torch._foreach_mul_(group, factor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor or `PartGradient`, or any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else plain(tensor)


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in map(local, tensors):
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    yield from groups.values()


def _apex(name: str, group: list[Tensor]) -> Callable[..., Any] | None:
    """Return apex's function for lists of these tensors, or None if they are not supported."""
    first = group[0]
    if first.device.type not in APEX_DEVICES or first.dtype not in APEX_DTYPES or not all(
            tensor.layout == torch.strided and tensor.is_contiguous() for tensor in group):
        return None
    operation, applier = fused.apex(name).value, fused.apex(fused.APPLIER).value
    if operation is None or applier is None:
        return None
    # apex writes an overflow flag here, which is not read
    overflow = torch.zeros(1, dtype=torch.int, device=first.device)
    return lambda lists, *arguments: applier(operation, overflow, lists, *arguments)
