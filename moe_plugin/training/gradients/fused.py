"""Fused implementations for this machine, and the reason for each selection.

apex (github.com/NVIDIA/apex) has kernels only for CUDA devices. A component of apex is used if
there is a CUDA device and the compiled extension of the component can be imported. Otherwise,
torch's implementation is used.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch

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
    """Import and cache `module.name` if the compiled module `extension` can be imported."""
    try:
        importlib.import_module(extension)
        value = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - a broken extension can raise anything
        text = (str(error).splitlines() or [""])[0]
        return FusedPart(None, f"apex: {type(error).__name__}: {text}")
    return FusedPart(value, f"{module}.{name} imports")


def fairseq_adam(dtypes: set[torch.dtype], *, torch_fused: bool, old: bool,
                 fp16_stats: bool) -> Choice:
    """Select fairseq's `--optimizer adam`; `active` is "torch", "apex" or "fairseq".

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
