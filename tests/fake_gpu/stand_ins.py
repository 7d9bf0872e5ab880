"""The Triton kernels on the counting device: what launches them runs, their results are made on the
CPU.

For every operation with a Triton implementation one more is registered here. It runs the launch
code with kernels that do nothing, so that all that the host does for it is noted, and lets the
torch reference compute on the CPU, which is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from moe_plugin.kernels import RowGroups, kernels
from moe_plugin.kernels.triton_ops import DTYPES
from tests.fake_gpu.device import OnDevice, inner, machine, outer


def install() -> None:
    """Register the stand-ins, once in a process; needs Triton, but no GPU."""
    from triton.runtime import jit

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: machine().kernel(str(kernel), args)

    jit.KernelInterface.__getitem__ = launcher
    for entry in kernels:
        if "triton" in entry.value.names():
            entry.value.add("counting", _why_not)(_stand_in(entry.value))


def _why_not(*args: Any) -> str | None:
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if not any(isinstance(x, OnDevice) for x in tensors):
        return "not on the counting device"
    wrong = next((x.dtype for x in tensors if x.is_floating_point()
                  and x.dtype not in (*DTYPES, torch.float8_e4m3fn)), None)
    return None if wrong is None else f"dtype {wrong}"


def _stand_in(op: Any) -> Callable[..., Any]:
    launch, reference = op.implementation("triton"), op.implementation("torch")

    def call(*args: Any) -> Any:
        like = launch(*args)
        lengths = [inner(vars(a.counts)["lengths_L"]) for a in args
                   if isinstance(a, RowGroups) and "lengths_L" in vars(a.counts)]
        made = machine().launch(op.name, reference, *map(_on_cpu, args), also=lengths,
                                like=like)
        # an argument that is written to comes back as it is
        known = {id(inner(x)): x for x in args if isinstance(x, OnDevice)}
        return known[id(made)] if id(made) in known else outer(made)

    return call


def _on_cpu(value: Any) -> Any:
    if isinstance(value, RowGroups):
        return dataclasses.replace(value, counts=_counts_on_cpu(value.counts),
                                   device=torch.device("cpu"))
    return inner(value)


def _counts_on_cpu(counts: Any) -> Any:
    lengths_L = vars(counts).get("lengths_L")
    return counts if lengths_L is None else type(counts)(inner(lengths_L), counts.rows)
