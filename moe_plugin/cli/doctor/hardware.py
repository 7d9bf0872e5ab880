"""Devices, and what is compiled for the CPU."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.cpu import products
from moe_plugin.kernels.cpu.native import functions
from moe_plugin.kernels.cpu.products import in_float32
from moe_plugin.planner.units import show_size
from moe_plugin.utils.machine import cpu_name

DRIVER = "/dev/nvidiactl"  # is there where NVIDIA's driver is loaded


def devices() -> list[dict[str, str]]:
    """One row for the CPU and for every GPU that torch finds."""
    threads = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    rows = [{
        "name": "cpu", "state": "active" if not torch.cuda.is_available() else "available",
        "what": f"{cpu_name()}, {threads}{_widened()}"
    }]
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        rows.append({
            "name": f"cuda:{index}", "state": "active",
            "what": f"{p.name}, {show_size(p.total_memory)}, compute capability "
                    f"{p.major}.{p.minor}"
        })
    if not torch.cuda.is_available():
        rows.append({"name": "cuda", "state": "not available", "what": _why_no_cuda()})
    return rows


def _widened() -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in (torch.bfloat16, torch.float16)
             if in_float32(dtype)]
    return f"; experts' products of {' and '.join(names)} in float32: no instructions for them" \
        if names else ""


def compiled() -> list[dict[str, str]]:
    """What is compiled for the CPU, at the latest now; elsewhere torch's operations compute it."""
    found = [(f"experts' {name}", functions.why_not(name)) for name in ACTIVATIONS]
    found.append(("several experts at a time, float32", products.why_one_by_one()))
    found.append((f"routers of up to {functions.EXPERTS} experts, bfloat16",
                  functions.why_not(None)))
    return [{"name": name, "state": "not available" if reason else "active",
             "what": f"by torch: {reason}" if reason else ""} for name, reason in found]


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return f"torch is built for CUDA {torch.version.cuda}, but finds no GPU"


def unused_gpu() -> str | None:
    """Why torch uses no GPU although a driver is loaded; None: it does, or there is none."""
    if torch.cuda.is_available() or not os.path.exists(DRIVER):
        return None
    return f"a GPU's driver is loaded, and {_why_no_cuda()}"


def environment() -> dict[str, Any]:
    """Python and platform."""
    return {"python": platform.python_version(), "platform": platform.platform()}
