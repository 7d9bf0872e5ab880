"""Registers, shared memory and spills of each Triton kernel, compiled without a GPU."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
# bytes per block
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
REGISTER_LIMIT = 255  # per thread; above it values spill
X, W, I32, I64, F32 = "*bf16", "*bf16", "*i32", "*i64", "*fp32"


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched.

    module: below moe_plugin.kernels.gpu. types: of its arguments, in order. constants: compile-time
    values.
    """

    kernel: str
    module: str
    types: tuple[str, ...]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs.

    registers, spilled: registers and bytes spilled per thread. shared: bytes of shared memory per
    block. matrix: it uses the matrix units.
    """

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    matrix: bool


def cases() -> Iterator[Case]:
    """Every kernel at a large model's sizes, with the widest tile of its search space."""
    yield Case("take_kernel", "rows", (X, I64, F32, X, "i32", "i32"),
               {"K": 2, "WEIGHTED": True, "BR": 4, "BD": 1024})
    yield Case("sum_kernel", "rows", (X, I64, F32, X, "i32", "i32"),
               {"K": 8, "WEIGHTED": True, "BT": 4, "BD": 1024})
    yield Case("dot_kernel", "rows", (X, X, I64, F32, "i32"),
               {"WIDTH": 4096, "K": 8, "BT": 4, "BD": 1024})
    yield Case("histogram_kernel", "running_count", (I64, I32, "i32", "i32"), {"BLOCK": 1024})
    yield Case("rank_kernel", "running_count", (I64, I32, I64, "i32", "i32"), {"BLOCK": 1024})
    yield Case("chunk_kernel", "layout", (X, X, "i32", "i32", "i32"), {"BLOCK": 2048})
    yield Case("quantize_kernel", "fp8", (X, "*fp8e4nv", F32, "i32", "i32", "i32"),
               {"LARGEST": 448.0, "SMALLEST": 2.0**-126, "ROUND": False, "BR": 16, "BLOCK": 128})
    yield Case("dequantize_kernel", "fp8", ("*fp8e4nv", F32, X, "i32", "i32", "i32"),
               {"BR": 16, "BLOCK": 128})
    for experts, tile in ((64, 16), (512, 2)):
        yield Case(
            "top_k_kernel", "router", (F32, "*i1", I64, I64, F32, F32, F32, F32, "i32", "i32"),
            {"K": 8, "GIVEN": False, "NORMALIZE": True, "EPS": 1e-7, "BT": tile, "BE": experts})
        yield Case("top_k_backward_kernel", "router",
                   (F32, "*i1", I64, F32, F32, F32, F32, F32, F32, "i32", "i32"),
                   {"K": 8, "NORMALIZE": True, "EPS": 1e-7, "BT": tile, "BE": experts})
    yield from _products()


def _products() -> Iterator[Case]:
    tile = {"UPCAST": False, "BM": 128}
    tables, sizes = (I32, I32, I32), ("i32", "i32", "i32", "i32", "i32")
    plain = {"K": 4096, "GATHER": False, "BIAS": False, "BASE": True, "ACT": "none", "GATED": False}
    first = {"K": 4096, "GATHER": True, "BIAS": True, "BASE": False, "ACT": "gelu", "GATED": False}
    gated = {**first, "ACT": "silu", "GATED": True}
    for values, bn in ((plain, 128), (first, 128), (gated, 128)):
        yield Case("matmul_kernel", "grouped_gemm", (X, I64, W, W, X, X, X, X, *tables, *sizes),
                   {**values, **tile, "BN": bn, "BK": 64}, 8)
    for act, is_gated in (("gelu", False), ("silu", True)):
        yield Case(
            "matmul_act_backward_kernel", "grouped_gemm",
            (X, I64, F32, W, X, X, X, X, X, F32, *tables, *sizes, "i32"), {
                "K": 4096, "GATHER": True, "SCALED": True, "ACT": act, "GATED": is_gated,
                **tile, "BN": 64, "BK": 64
            }, 8)
    weight = {"I": 4096, "O": 14336, "UPCAST": False, "WHILE": False, "BI": 128, "BR": 64}
    into_in, into_out = ({"X_GATHER": not second, "G_GATHER": second, "SCALED": second}
                         for second in (False, True))
    yield Case("weight_grad_kernel", "grouped_gemm", (X, X, I64, I64, F32, X, I32, I64),
               {**weight, **into_in, "ADD": False, "BO": 256}, 8)
    for flags in (into_in, into_out):
        yield Case("weight_add_kernel", "grouped_gemm", (X, X, I64, I64, F32, F32, I32, I64),
                   {**weight, **flags, "ADD": True, "BO": 128}, 8)
    yield Case("bias_grad_kernel", "grouped_gemm", (X, I64, F32, X, I32, I64, "i32"),
               {"GATHER": True, "SCALED": True, "BR": 64, "BO": 128})


def compile_for(case: Case, target: str) -> Resources:
    """Compile one kernel for one target and read what it needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"moe_plugin.kernels.gpu.{case.module}"), case.kernel)
    if isinstance(kernel, triton.runtime.Autotuner):
        kernel = kernel.fn
    names = kernel.arg_names
    dynamic = [n for n in names if n not in case.constants]
    if len(dynamic) != len(case.types):
        raise ValueError(f"{case.kernel} takes {dynamic}, the case gives {len(case.types)} types")
    types = _fp8_of(target, dict(zip(dynamic, case.types, strict=True)))
    source = ASTSource(
        fn=kernel, signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in case.constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items()
               if t.startswith("*") or n.startswith(("wide", "width", "stride"))})
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]),
                          options={"num_warps": case.warps, "num_stages": case.stages})
    return _nvidia(case, target, made) if TARGETS[target][0] == "cuda" else _amd(case, target, made)


def _fp8_of(target: str, types: dict[str, str]) -> dict[str, str]:
    # gfx942 has its own fp8 formats, and a GPU before sm_89 none
    other = {"gfx942": "*fp8e4b8", "sm_80": "*fp8e4b15"}.get(target)
    return {n: other if other and t == "*fp8e4nv" else t for n, t in types.items()}


def _nvidia(case: Case, target: str, made: Any) -> Resources:
    ptx = made.asm["ptx"]
    arch = re.search(r"\.target (sm_\w+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx, encoding="utf-8")
        said = subprocess.run([
            _ptxas(TARGETS[target][1]), "-v", "--gpu-name", arch,
            str(path), "-o", f"{folder}/kernel.cubin"
        ], capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", said).group(1))
    spilled = sum(
        map(int,
            re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said).groups()))
    return Resources(case.kernel, target, registers, spilled, made.metadata.shared, "wgmma" in ptx
                     or "mma.sync" in ptx)


def _ptxas(capability: int) -> str:
    """The assembler that Triton uses: from 3.5 on it ships two, and only one reads its PTX."""
    from triton.backends.nvidia import compiler

    try:
        return compiler.get_ptxas(capability).path
    except (AttributeError, TypeError):  # before 3.5
        return str(Path(compiler.__file__).parent / "bin/ptxas")


def _amd(case: Case, target: str, made: Any) -> Resources:
    text = made.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))

    return Resources(case.kernel, target, field("vgpr_count"), 4 * field("vgpr_spill_count"),
                     made.metadata.shared, "mfma" in text)


def label(case: Case) -> str:
    """The kernel and the compile-time values that distinguish its cases."""
    shown = {
        k: v for k, v in case.constants.items()
        if k in ("BE", "BN", "BO", "K", "ACT", "SCALED") and not (k == "K" and v > 64)
    }
    return case.kernel.removesuffix("_kernel") + "".join(f" {k}={v}" for k, v in shown.items())
