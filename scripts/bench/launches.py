"""Record the Triton launches of a layer on a machine without a GPU: the kernels to compile, and the
work of each launch.

Tensors are on torch's `meta` device, which the layer treats as a GPU. Nothing is computed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.dispatch.token_entry import TokenEntry
from moe_plugin.kernels.gpu.tilings import Chip
from moe_plugin.kernels.registry import Op
from moe_plugin.kernels.weight_grads import WEIGHTS
from moe_plugin.layer import MoELayer
from scripts.bench.problem import Problem, layer_settings

META = torch.device("meta")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
         torch.float64: "fp64", torch.int64: "i64", torch.int32: "i32", torch.bool: "i1",
         torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv"}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "num_ctas")
ALIGNED = 16  # Triton compiles separate code for addresses and numbers that are multiples of this


@dataclass(frozen=True)
class Launch:
    """A Triton kernel with all arguments that determine the compiled code. Equal launches run the
    same compiled code.

    Attributes:
        module: name of the kernel's module in moe_plugin.kernels.gpu.
        types: types of the run-time arguments, in Triton's notation.
        constants: compile-time values. As in Triton, arguments with the value 1 are also constants.
        aligned: names of the arguments that are multiples of 16.
        options: number of warps, number of stages, and maximum number of registers.
    """

    module: str
    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def label(self) -> str:
        """The name of the kernel, with the dtype, flags, options and sizes that distinguish it."""
        said = [next((t[1:] for _, t in self.types if t.startswith("*")), "")]
        for name, value in self.constants:
            if value is True or (isinstance(value, str) and value not in ("none", "ieee")):
                said.append(name.lower() if value is True else value)
        sizes = [f"{name}{value}" for name, value in self.constants
                 if type(value) is int and value > 1]
        return f"{self.kernel.removesuffix('_kernel')} {' '.join([*said, *sizes])}"


@dataclass(frozen=True)
class Call:
    """One launch of a kernel, together with the sizes of its arguments.

    Attributes:
        launch: the launch.
        shapes: shapes of the tensor arguments, by name.
        numbers: values of the integer arguments, by name.
        bytes: total size of all tensor arguments in bytes. Each tensor is counted once, even if it
            is both read and written.
        programs: number of programs in the grid.
    """

    launch: Launch
    shapes: Mapping[str, tuple[int, ...]]
    numbers: Mapping[str, int]
    bytes: int
    programs: int


@dataclass
class Recorded:
    """The recorded calls and operations in the order in which they were made.

    Attributes:
        calls: launches of Triton kernels.
        operations: torch operations that compute new tensors, as pairs (name, bytes). Views and
            memory allocations are not included.
    """

    calls: list[Call] = field(default_factory=list)
    operations: list[tuple[str, int]] = field(default_factory=list)


def recorded(run: Callable[[], object], chip: Chip) -> Recorded:
    """Run a function on the device `META`, and record everything as if on the given GPU."""
    from triton.runtime import jit

    from moe_plugin.kernels.gpu import expert_ffn, expert_matmul, fp8, frozen

    found = Recorded()

    def launched(kernel: Any, grid: Any) -> Any:
        return lambda *args, **options: found.calls.append(_call(kernel, grid, args, options))

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
                (jit.KernelInterface, "__getitem__", launched), (Op, "interpreted", True),
                *((module, "chip_of", lambda _: chip) for module in (expert_matmul, fp8, frozen)),
                (expert_ffn, "_traced", lambda _: False), (TokenEntry, "_check", lambda *_: None),
                (torch, "is_autocast_enabled", lambda *_: False),
                (torch, "autocast", lambda *_, **__: contextlib.nullcontext())):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(_Operations(found.operations))
        run()
    return found


class _Operations(TorchDispatchMode):
    """Record the torch operations that write new tensors."""

    def __init__(self, seen: list[tuple[str, int]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.namespace == "aten" and not func.is_view and "empty" not in name:
            self.seen.append((name, _bytes(x for x in tree_leaves((args, kwargs, made))
                                           if isinstance(x, Tensor))))
        return made


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total size of tensors in bytes. Memory shared by several tensors is counted once.
    """
    each = {(t.untyped_storage()._cdata, t.storage_offset(), t.numel()): t for t in tensors}
    return sum(t.numel() * t.element_size() for t in each.values())


def _call(kernel: Any, grid: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Call:
    bound = dict(zip(kernel.arg_names, args, strict=False))
    bound |= {name: value for name, value in given.items() if name in kernel.arg_names}
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    tensors = {name: getattr(value, "base", value) for name, value in bound.items()
               if isinstance(getattr(value, "base", value), Tensor)}
    types, constants, aligned = [], [], []
    for name in kernel.arg_names:
        value = bound[name]
        if name in fixed or value is None or type(value) is int and value == 1:
            constants.append((name, value))
            continue
        types.append((name, _type(value)))
        if _is_aligned(value):
            aligned.append(name)
    options = tuple((name, given[name]) for name in OPTIONS if name in given)
    launch = Launch(kernel.fn.__module__.rpartition(".")[2], kernel.fn.__name__, tuple(types),
                    tuple(constants), tuple(aligned), options)
    programs = math.prod(grid) if isinstance(grid, tuple) else grid
    numbers = {name: value for name, value in bound.items() if type(value) is int}
    return Call(launch, {name: tuple(t.shape) for name, t in tensors.items()}, numbers,
                _bytes(tensors.values()), programs)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if hasattr(value, "block_shape"):
        sizes = ", ".join(map(str, value.block_shape))
        return f"tensordesc<{TYPES[value.base.dtype]}[{sizes}]>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _is_aligned(value: Any) -> bool:
    if isinstance(value, Tensor):  # allocations are aligned, so only the offset matters
        return value.storage_offset() * value.element_size() % ALIGNED == 0
    return isinstance(value, int) and value % ALIGNED == 0


def step(problem: Problem, adds: bool = False, **sections: Mapping[str, Any]) -> Callable[[], None]:
    """Return a function that runs the forward and backward pass of one layer on the device `META`.

    Args:
        adds: whether weight gradients are accumulated in a float32 `main_grad`.
        sections: settings that override the benchmark's layer settings, by section.
    """
    p, tree = problem, layer_settings(problem, "kernels")
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    layer = MoELayer(from_dict(tree), LocalComm(), dtype=p.torch_dtype, device=META).to(META)
    if adds:
        layer.experts.adds_to_main_grad = True
        for name in WEIGHTS:
            if (parameter := getattr(layer.experts, name)) is not None:
                parameter.main_grad = torch.empty(parameter.shape, device=META)
                parameter.grad_added_to_main_grad = False

    def run() -> None:
        x_TD = torch.empty(p.tokens, p.model_dim, dtype=p.torch_dtype, device=META)
        out = layer(x_TD.requires_grad_())
        torch.autograd.backward([out.output, *out.losses.values()],
                                [torch.empty_like(x_TD), *[None] * len(out.losses)])

    return run
