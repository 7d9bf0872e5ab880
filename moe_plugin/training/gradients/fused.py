"""Fused implementations for this machine, and the reason for each selection.

apex (github.com/NVIDIA/apex) has kernels only for CUDA devices. A component of apex is used if
there is a CUDA device and the compiled extension of the component can be imported. Otherwise,
torch's implementation is used. The norms of many tensors are computed, and many tensors are scaled,
at once.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.training.gradients.part_gradients import plain
from moe_plugin.utils.tensors import is_sharded

ADAM, ADAM_16_BIT = "FusedAdam", "FusedAdam, 16-bit statistics"
LAYER_NORM, RMS_NORM = "FusedLayerNorm", "FusedRMSNorm"
L2_NORM, SCALE, APPLIER = "multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_applier"
# for each part: module, name, and the compiled module that it needs
APEX = {
    ADAM: ("apex.optimizers", "FusedAdam", "amp_C"),
    ADAM_16_BIT: ("fused_adam_cuda", "adam", "fused_adam_cuda"),
    LAYER_NORM: ("apex.normalization", "FusedLayerNorm", "fused_layer_norm_cuda"),
    RMS_NORM: ("apex.normalization", "FusedRMSNorm", "fused_layer_norm_cuda"),
    APPLIER: ("apex.multi_tensor_apply", "multi_tensor_applier", "amp_C"),
    L2_NORM: ("amp_C", "multi_tensor_l2norm", "amp_C"),
    SCALE: ("amp_C", "multi_tensor_scale", "amp_C"),
}


@dataclass(frozen=True)
class FusedPart:
    """A component of apex, and whether it can be used.

    Attributes:
        value: class or function of apex, or None if the component cannot be used.
        reason: the reason why this component can or cannot be used.
    """

    value: Any
    reason: str


@dataclass(frozen=True)
class Choice:
    """The implementation that was selected for one purpose.

    Attributes:
        role: the purpose of the implementation.
        active: the name of the selected implementation.
        reason: the reason why this implementation was selected.
    """

    role: str
    active: str
    reason: str


def apex(name: str) -> FusedPart:
    """Return the component `name` of apex, for tensors on a CUDA device."""
    if not torch.cuda.is_available():
        return FusedPart(None, "apex needs a CUDA device, and there is none")
    return imported(*APEX[name])


@functools.cache
def imported(module: str, name: str, extension: str) -> FusedPart:
    """Import `module.name`. The compiled module `extension` must be importable. The imported object
    is cached for the lifetime of the process.
    """
    try:
        importlib.import_module(extension)
        value = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - a broken extension can raise anything
        text = (str(error).splitlines() or [""])[0]
        return FusedPart(None, f"apex: {type(error).__name__}: {text}")
    return FusedPart(value, f"{module}.{name} imports")


def fairseq_adam(dtypes: set[torch.dtype], *, torch_fused: bool, old: bool,
                 fp16_stats: bool) -> Choice:
    """Select the implementation of fairseq's `--optimizer adam`. The field `active` is "torch",
    "apex" or "fairseq".

    Args:
        dtypes: dtypes of the parameters.
        torch_fused: value of `--moe-fused-adam`.
        old: value of `--use-old-adam`.
        fp16_stats: value of `--fp16-adam-stats`.
    Raises:
        ValueError: If two of the flags cannot be combined.
    """
    role = "fairseq --optimizer adam"
    if old and (torch_fused or fp16_stats):
        other = "--moe-fused-adam" if torch_fused else "--fp16-adam-stats"
        raise ValueError(f"{other} and --use-old-adam cannot be combined: fairseq's own Adam is "
                         "not fused and has fp32 statistics; leave one of the two flags out")
    if torch_fused:
        return Choice(role, "torch", "--moe-fused-adam")
    if old:
        return Choice(role, "fairseq", "--use-old-adam")
    legacy, current = apex(ADAM_16_BIT), apex(ADAM)
    if legacy.value is not None:
        return Choice(role, "apex", legacy.reason)
    if fp16_stats:
        return Choice(role, "torch", f"--fp16-adam-stats; {legacy.reason}")
    if current.value is None:
        return Choice(role, "fairseq", current.reason)
    if torch.bfloat16 in dtypes:
        return Choice(role, "torch", "fairseq's use of apex.optimizers.FusedAdam does not support "
                      "bfloat16 parameters (--memory-efficient-bf16)")
    return Choice(role, "apex", current.reason)


def choices() -> list[Choice]:
    """Return the implementations that this machine uses by default, for a report."""
    try:
        importlib.import_module("transformer_engine.pytorch")
        engine = "it imports"
    except Exception as error:  # noqa: BLE001 - a broken extension can raise anything
        engine = f"not available: {type(error).__name__}: {error}".splitlines()[0]
    fairseq = fairseq_adam(set(), torch_fused=False, old=False, fp16_stats=False)
    names = {"torch": "torch's fused Adam", "apex": "apex FusedAdam", "fairseq": "fairseq's own"}
    return [
        Choice(fairseq.role, names[fairseq.active], fairseq.reason
               + "; --moe-fused-adam: torch's fused Adam" * (fairseq.active == "fairseq")),
        Choice("fairseq --fp16-adam-stats", *_or("torch's fused Adam", ADAM_16_BIT)),
        _megatron_adam(engine == "it imports"),
        Choice("layer norm", *_or("torch.nn.LayerNorm", LAYER_NORM)),
        Choice("RMS norm", *_or("torch.nn.RMSNorm", RMS_NORM)),
        Choice("gradient norm", *_or("torch._foreach_norm", L2_NORM)),
        Choice("gradient scaling", *_or("torch._foreach_mul_", SCALE)),
        Choice("Transformer Engine", "yes" if engine == "it imports" else "no", engine),
    ]


def _or(torch_part: str, name: str) -> tuple[str, str]:
    part = apex(name)
    return (torch_part if part.value is None else f"apex {name}"), part.reason


def _megatron_adam(engine: bool) -> Choice:
    role = "Megatron --optimizer adam"
    if engine:
        return Choice(role, "Transformer Engine FusedAdam", "Transformer Engine imports")
    # Megatron itself only checks for the Python module
    part = imported("apex.optimizers", "FusedAdam", "apex")
    if part.value is not None:
        return Choice(role, "apex FusedAdam", part.reason)
    return Choice(role, "torch.optim.AdamW", f"{part.reason}; --moe-fused-adam: fused")


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
            place: position of these tensors in the order of summation. `add` may be called in any
                order.
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
    if (norm_op := _apex(L2_NORM, group)) is not None:
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
        elif (scale_op := _apex(SCALE, group)) is not None:
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
    operation, applier = apex(name).value, apex(APPLIER).value
    if operation is None or applier is None:
        return None
    # apex writes an overflow flag here, which is not read
    overflow = torch.zeros(1, dtype=torch.int, device=first.device)
    return lambda lists, *arguments: applier(operation, overflow, lists, *arguments)
