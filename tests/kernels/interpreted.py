"""Run in a process of its own with TRITON_INTERPRET=1: every Triton kernel against its float64
reference, on CPU tensors.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted [--all] [operation ...]

Without `--all` an operation that has several lists of arguments meets each of them in one dtype a
shape, so that every two of list, dtype and shape meet; products in a third of the shapes, since
their interpretation takes minutes; those of `PARTS` each list in every dtype.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels import kernels
from moe_plugin.kernels.groups import RowGroups
from tests.kernels.problems import SHAPES, arguments, fresh, words

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of the most lists, every so manieth of the shapes and dtypes: three lists differ in one argument
PARTS = {"expert_weight_grad_add": 18, "expert_weight_grad": 9, "expert_weight_grad_pair": 9,
         "route_top_k_backward": 9, "expert_matmul_fp8": 5}
TWICE = ("plain", "dropped choices")
AS_THEY_ARE = ("dequantize_fp8", "expert_matmul_fp8")  # their result's dtype is an argument
# the interpreter truncates when it rounds to bfloat16, so a value may be one step off
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# of each product: the matrix units read 11 bits of both operands and drop the others (the
# interpreter reads all of them)
TF32 = 2**-9
SUMS_OF_PRODUCTS = ("expert_matmul", "expert_matmul_sum", "expert_weight_grad",
                    "expert_weight_grad_add")


def widened(value: Any) -> Any:
    """Floating-point tensors in float64; fp8 codes stay codes."""
    if isinstance(value,
                  Tensor) and value.is_floating_point() and value.dtype != torch.float8_e4m3fn:
        return value.double()
    return tuple(map(widened, value)) if isinstance(value, tuple) else value


def reference(name: str, args: list[Any]) -> Any:
    """What the operation's reference computes, in float64; its arguments are not changed."""
    if name not in AS_THEY_ARE:
        args = [widened(a) for a in args]
    want = kernels.get(name).implementation("torch")(*fresh(args))
    return widened(want)


def check_result(name: str, got: Any, args: list[Any], dtype: torch.dtype, what: str,
                 sums: float = 0.0) -> None:
    """What a kernel computed in `dtype` from `args`, against the reference. sums: what the device's
    sums of products may be off by, where that is more than the dtype's rounding.
    """
    want = reference(name, args)
    if name == "expert_matmul_act_backward":  # any number of partial sums
        got = *got[:3], got[3].sum(0, keepdim=True)
    in_tf32 = "tf32" in words(args)
    compare(got, want, max(sums, TF32 if in_tf32 else TOLERANCE[dtype]), what)
    if in_tf32 and name in SUMS_OF_PRODUCTS:
        sizes = [a.abs() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        off = (got.double() - want).abs()
        assert bool((off <= TF32 * reference(name, sizes)).all()), f"{what}: off by {off.max()}"


def compare(got: Any, want: Any, tolerance: float, what: str) -> None:
    """Every output; tensors in the norm of the reference, integers exactly."""
    if isinstance(want, tuple):
        for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            compare(mine, theirs, tolerance, f"{what}, output {number}")
    elif want is None:
        assert got is None, what
    elif want.dtype == torch.float8_e4m3fn:
        assert torch.equal(got.float().isnan(), want.float().isnan()), f"{what}: NaN elsewhere"
        got, want = got.float().nan_to_num(), want.float().nan_to_num()
        off = (got - want).abs()
        assert bool(
            (off <= want.abs() * 0.126 + 2**-8).all()), f"{what}: codes off by up to {off.max()}"
    elif not want.is_floating_point():
        assert torch.equal(got, want), f"{what}: {got} != {want}"
    else:
        scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * scale,
                                   equal_nan=True, msg=lambda m: f"{what}: {m}")


def problems(name: str, whole: bool) -> Iterator[tuple[str, torch.dtype, int, list[Any]]]:
    """(label of a shape, dtype, number of a list of arguments, that list): all, or of every list a
    part of the shapes and dtypes that have it, where lists are many.
    """
    fixed = name.startswith("route_") or name in ("running_count", "sorted_choices", "choice_load",
                                                 "take_values", "tile_table")
    lists = {(label, dtype): list(arguments(name, shape, dtype))
             for label, shape in SHAPES.items() for dtype in (DTYPES[:1] if fixed else DTYPES)}
    whole = whole or name not in PARTS and min(map(len, lists.values())) < (6 if fixed else 2)
    for number in range(max(map(len, lists.values()))):
        having = [key for key, some in lists.items() if number < len(some)]
        labels = list(dict(having))
        part = min(PARTS.get(name, 9 if name.startswith("expert_") else 3), len(having))
        for label, dtype in having:
            place = labels.index(label) + DTYPES.index(dtype)
            if whole or (place + number) % part == 0:
                yield label, dtype, number, lists[label, dtype][number]


def check(name: str, whole: bool) -> int:
    """One operation; returns the number of comparisons."""
    kernel, done = kernels.get(name), 0
    for label, dtype, number, args in problems(name, whole):
        what = f"{name}, {label}, {dtype}, arguments {number}"
        assert kernel.choose(*args) == "triton", f"{what}: {kernel.why_not('triton', *args)}"
        got = kernel(*fresh(args))
        twice = label in TWICE and (whole or number % 3 == 0)  # it is slow
        again = kernel(*fresh(otherwise(args))) if twice else got
        check_result(name, got, args, dtype, what)
        check_same(got, again, what)
        done += 1
    return done


def otherwise(args: list[Any]) -> list[Any]:
    """The same arguments, tiles in another schedule: each gives the same bits."""
    return [replace(a, schedule="split") if isinstance(a, RowGroups) else a
            for a in args]


def check_same(got: Any, again: Any, what: str) -> None:
    """Two results of a kernel, bit for bit."""
    for mine, other in zip(*[v if isinstance(v, tuple) else (v,) for v in (got, again)],
                           strict=True):
        assert mine is None or torch.equal(mine.reshape(-1).view(torch.uint8),
                                           other.reshape(-1).view(torch.uint8)), (
            f"{what}: not the same twice, or in another schedule")


def main(names: list[str]) -> None:
    """Check the named operations, or all that have a Triton implementation."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    import moe_plugin.kernels.gpu.tilings as tilings

    assert tilings.INTERPRETED
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # fills torch.empty with NaN: an element that is not written shows
    torch.use_deterministic_algorithms(True)
    whole = "--all" in names
    for name in [n for n in names if n != "--all"] or [
            e.name for e in kernels if "triton" in e.value.names()]:
        print(name, check(name, whole), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
