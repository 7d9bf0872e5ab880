"""The operations with a Triton implementation, and functions that decide when Triton is used.

Triton is imported when the first of these operations runs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.groups import TileSchedule
from moe_plugin.kernels.registry import Op, kernels
from moe_plugin.kernels.router import Rule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODULES = {
    "take_rows": "rows", "sum_rows": "rows", "dot_rows": "rows", "running_count": "rows",
    "sorted_choices": "rows", "choice_load": "rows", "take_values": "rows",
    "route_top_k": "router", "route_top_k_backward": "router", "transpose_chunks": "rows",
    "quantize_fp8": "fp8", "dequantize_fp8": "fp8", "expert_matmul": "expert_matmul",
    "expert_matmul_act": "expert_matmul", "expert_matmul_act_backward": "expert_matmul",
    "expert_matmul_sum": "expert_matmul", "expert_matmul_gated": "expert_matmul",
    "write_pages": "rows", "read_pages": "rows",
    "expert_weight_grad": "expert_matmul", "expert_weight_grad_add": "expert_matmul",
    "expert_weight_grad_pair": "expert_matmul",
    "expert_bias_grad": "expert_matmul", "tile_table": "tilings",
    "quantize_weights_fp8": "fp8", "expert_matmul_fp8": "fp8", "expert_matmul_frozen": "frozen",
}
INSTALLED = find_spec("triton") is not None


def why_not(*args: Any) -> str | None:
    """Return the reason why Triton cannot be used for these arguments, or None if it can."""
    if torch.compiler.is_compiling():
        return "torch.compile fuses the torch reference"
    if not INSTALLED:
        return "triton is not installed: pip install moe-plugin[triton]"
    tensors = [a for a in _flat(args) if isinstance(a, Tensor)]
    if not any(t.is_cuda for t in tensors) and not (tensors and Op.interpreted):
        return "not on a GPU"
    wrong = next((t.dtype for t in tensors
                  if t.is_floating_point() and t.dtype not in (*DTYPES, torch.float8_e4m3fn)), None)
    if wrong is not None:
        return f"dtype {wrong}"
    return next((reason for t in tensors if t.dtype == torch.bfloat16 and t.is_cuda
                 and (reason := no_bfloat16(t.device))), None)


@functools.cache
def no_bfloat16(device: torch.device) -> str | None:
    """Return the reason why this GPU does not support bfloat16, or None. Cached per device."""
    return _below(device, (8, 0), "bfloat16")


def _below(device: torch.device, needed: tuple[int, int], what: str) -> str | None:
    """Return the reason why an NVIDIA GPU does not support a number format, or None if the format
    is supported or the GPU is not an NVIDIA GPU.
    """
    if torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= needed:
        return None
    return (f"a GPU of compute capability {major}.{minor} has no {what}, which needs "
            f"{needed[0]}.{needed[1]}")


def route_why_not(*args: Any) -> str | None:
    """Return the reason from `why_not`, or a message if the kernel lacks the score function."""
    reason = why_not(*args)
    if reason is not None:
        return reason
    score = next(a for a in args if isinstance(a, Rule)).score
    return None if "triton" in score.kernels else f"the kernel has no {type(score).__name__}"


def product_why_not(*args: Any) -> str | None:
    """Return the reason from `why_not`, or why Triton cannot run matmuls on this GPU."""
    reason, device = why_not(*args), _gpu(args)
    if reason is not None or device is None:
        return reason
    if torch.version.hip is not None and any(a == "tf32" for a in _flat(args) if type(a) is str):
        # MI355X has no such products, and on MI300X weight gradients would need 96 KiB of shared
        # memory, but only 64 KiB exist.
        return "products in tf32 are for NVIDIA GPUs"
    return no_products(device)


@functools.cache
def no_products(device: torch.device) -> str | None:
    """Return the reason why the installed Triton cannot run any matmul on this GPU, or None if it
    can.

    Cached per device.
    """
    import triton

    major, minor = map(int, triton.__version__.split(".")[:2])
    if torch.version.hip is not None or (major, minor) >= (3, 6):
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability <= (8, 0) or capability == (8, 7):
        return None
    if capability[0] == 10:
        return (f"Triton {triton.__version__} cannot compile the weight gradients of gated "
                "experts for GPUs of compute capability 10; Triton 3.6 can")
    if (major, minor) >= (3, 4):
        return None
    return ("matmuls compiled by Triton {} need more shared memory than a GPU of compute "
            "capability {}.{} has; Triton 3.4 is needed".format(triton.__version__, *capability))


@functools.cache
def no_schedule(schedule: TileSchedule, device: torch.device) -> str | None:
    """Return the reason why the installed Triton does not support this schedule on this GPU, or
    None if the schedule is supported.

    Cached per device.
    """
    import triton

    if not schedule.specialize:
        return None
    if torch.version.hip is not None:
        return "Triton's specialized warps are for NVIDIA GPUs"
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version < (3, 4):
        return f"Triton {triton.__version__} has no specialized warps; Triton 3.4 is needed"
    if torch.cuda.get_device_capability(device)[0] != 10:
        return ("Triton specializes warps of these loops only on GPUs of compute capability 10, "
                "but this GPU has {}.{}".format(*torch.cuda.get_device_capability(device)))
    return None


def fp8_why_not(*args: Any) -> str | None:
    """Return the reason from `why_not`, or a message if the GPU cannot convert values to e4m3. If
    the GPU cannot convert values to e4m3, the torch reference emulates the conversion.
    """
    reason, device = why_not(*args), _gpu(args)
    return reason if reason is not None or device is None else no_e4m3(device)


def fp8_product_why_not(*args: Any) -> str | None:
    """Return the reason from `fp8_why_not`, or why Triton cannot run matmuls on this GPU."""
    reason, device = fp8_why_not(*args), _gpu(args)
    return reason if reason is not None or device is None else no_products(device)


@functools.cache
def no_e4m3(device: torch.device) -> str | None:
    """Return the reason why this GPU does not support float8 e4m3fn, or None. Cached per device."""
    if torch.version.hip is None:
        return _below(device, (8, 9), "e4m3")
    name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    # CDNA 4 and RDNA 4 have the OCP format (e4m3fn), CDNA 3 has e4m3fnuz, and other architectures
    # have no fp8.
    if name.startswith(("gfx95", "gfx12")):
        return None
    return f"{name} has another fp8 format" if name.startswith("gfx94") else f"{name} has no fp8"


def _gpu(args: Iterable[Any]) -> torch.device | None:
    return next((a.device for a in _flat(args) if isinstance(a, Tensor) and a.is_cuda), None)


def _flat(args: Iterable[Any]) -> Iterable[Any]:
    for a in args:
        yield from (_flat(a) if isinstance(a, (tuple, list)) else (a,))


def _late(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        module = importlib.import_module(f"moe_plugin.kernels.gpu.{MODULES[name]}")
        tensor = next((a for a in _flat(args) if isinstance(a, Tensor) and a.is_cuda), None)
        if tensor is None:  # Triton's interpreter
            return getattr(module, name)(*args)
        # Triton launches on the current device, even if its arguments are on another device.
        with torch.cuda.device_of(tensor):
            return getattr(module, name)(*args)

    call.__name__, call.__doc__ = name, f"{name} in Triton."
    return call


def register() -> None:
    """Register the Triton implementations of the operations. The package calls it once."""
    special = {"router": route_why_not, "expert_matmul": product_why_not, "fp8": fp8_why_not,
               "frozen": product_why_not}
    for name, module in MODULES.items():
        can = fp8_product_why_not if name == "expert_matmul_fp8" else special.get(module, why_not)
        kernels.get(name).add("triton", can, on_cpu=False)(_late(name))
    assert {"gelu", "gelu_tanh", "quick_gelu", "relu", "silu",
            "squared_relu"} == set(ACTIVATIONS), "gpu.tilings.activate implements other activations"
