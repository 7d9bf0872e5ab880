"""Registers, shared memory, spills and instructions of each Triton kernel, compiled without a GPU.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_plugin.kernels.gpu.tilings import (
    FP8_TILING,
    ROUTER_REGISTERS_BACKWARD,
    ROUTER_VALUES,
    ROUTER_VALUES_BACKWARD,
    Chip,
    Tiling,
    product_tiling,
    router_tokens,
    weight_tiling,
)
from moe_plugin.lab.bench.chips import GPU, GPUS

X, I32, I64, F32 = "*bf16", "*i32", "*i64", "*fp32"
FEW, MANY = 32, 4096  # rows of an expert


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched on one target.

    Attributes:
        module: below moe_plugin.kernels.gpu.
        types: of its arguments, in order.
        constants: compile-time values.
        product: it multiplies matrices.
        copies: its operands are copied by tile (TMA).
        bound: of its registers per thread on NVIDIA GPUs, see
            `kernels.gpu.common.bounded_registers`.
    """

    label: str
    kernel: str
    module: str
    types: tuple[str, ...]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    product: bool = False
    copies: bool = False
    bound: int | None = None


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs.

    Attributes:
        registers, spilled: registers and bytes spilled per thread.
        shared: bytes of shared memory per block.
        blocks: that a multiprocessor runs at once.
        occupancy: their warps over the most that it can.
        matrix: instructions of the matrix units in its assembly, "" for none.
        copies: it has the instruction that copies a tile.
    """

    label: str
    target: str
    registers: int
    spilled: int
    shared: int
    blocks: int
    occupancy: float
    matrix: str
    copies: bool


def cases(target: str) -> Iterator[Case]:
    """Every kernel at a large model's sizes, with the tiles that it gets on this target."""
    yield from _row_kernels()
    yield from products(target)


def _row_kernels() -> Iterator[Case]:
    yield Case("take", "take_kernel", "rows", (X, I64, F32, X, "i32", "i32"),
               {"K": 2, "WEIGHTED": True, "BR": 4, "BD": 1024})
    yield Case("sum", "sum_kernel", "rows", (X, I64, F32, X, "i32", "i32"),
               {"K": 8, "WEIGHTED": True, "BT": 4, "BD": 1024})
    yield Case("dot", "dot_kernel", "rows", (X, X, I64, F32, "i32"),
               {"WIDTH": 4096, "K": 8, "BT": 4, "BD": 1024})
    yield Case("histogram", "histogram_kernel", "running_count", (I64, I32, "i32", "i32"),
               {"BLOCK": 256})
    yield Case("rank", "rank_kernel", "running_count", (I64, I32, I64, "i32", "i32"),
               {"BLOCK": 256, "STEP": 32})
    yield Case("chunks", "chunk_kernel", "layout", (X, X, "i32", "i32", "i32"), {"BLOCK": 2048})
    for name in ("write_pages", "read_pages"):
        kernel = f"{name.removesuffix('_pages')}_kernel"
        yield Case(name.replace("_", " "), kernel, "pages",
                   (X, I64, X, X, "i32", "i32", "i32"), {"BLOCK": 2048})
    yield Case("quantize", "quantize_kernel", "fp8", (X, "*fp8e4nv", F32, "i32", "i32", "i32"),
               {"LARGEST": 448.0, "SMALLEST": 2.0**-126, "ROUND": False, "BR": 16, "BLOCK": 128})
    yield Case("dequantize", "dequantize_kernel", "fp8",
               ("*fp8e4nv", F32, X, "i32", "i32", "i32"), {"BR": 16, "BLOCK": 128})
    yield Case("quantize weights", "quantize_weights_kernel", "fp8_products",
               (X, "*fp8e4nv", F32, "i32", "i32", "i32", "i32", "i32", "i32", "i32"),
               {"LARGEST": 448.0, "SMALLEST": 2.0**-126, "ROUND": False, "BLOCK": 128}, 8)
    yield Case("tiles", "tile_kernel", "tiles", (I64, I32, I32, I32, "i32", "i32", "i32", "i32"),
               {"BT": 64, "BL": 64})
    for experts in (64, 512):
        yield from _router(f"top k of {experts}", experts, 8, sigmoid=True, groups=8)
    for experts, top_k in ((8, 2), (128, 8)):
        yield from _router(f"softmax top k of {experts}", experts, top_k, sigmoid=False, groups=0)
    yield Case("bias grad", "bias_grad_kernel", "weight_grads",
               (X, I64, F32, X, I32, I64, "i32"),
               {"GATHER": True, "SCALED": True, "BR": 64, "BO": 128})
    yield Case("join", "join_kernel", "weight_grads", (F32, X, I32, I64, "i32", "i32"),
               {"ADD": False, "BLOCK": 1024})


def _router(label: str, experts: int, top_k: int, sigmoid: bool, groups: int) -> Iterator[Case]:
    """Choice of experts and its gradient: sigmoid scores with a bias in groups, or softmax."""
    shared = {"K": top_k, "MASKED": True, "NORMALIZE": True, "SIGMOID": sigmoid, "EPS": 1e-7,
              "BE": experts}
    yield Case(label, "top_k_kernel", "router",
               (F32, "*i1", I64, F32, I64, F32, F32, F32, F32, "i32", "i32"),
               {**shared, "GIVEN": False, "BIASED": sigmoid, "GROUPS": groups, "TAKE": groups // 2,
                "BEST": min(2, groups), "BG": max(1, groups),
                "BT": router_tokens(experts, ROUTER_VALUES)})
    yield Case(f"{label}, backward", "top_k_backward_kernel", "router",
               (F32, "*i1", I64, F32, F32, F32, F32, F32, F32, "i32", "i32"),
               {**shared, "OF_WEIGHTS": True, "OF_IMPORTANCE": True, "OF_Z": True,
                "BT": router_tokens(experts, ROUTER_VALUES_BACKWARD)},
               bound=ROUTER_REGISTERS_BACKWARD)


def products(target: str) -> Iterator[Case]:
    """The matrix products, as a layer's forward and backward launch them."""
    for rows, note in ((MANY, ""), (FEW, f", {FEW} rows")):
        yield _product(target, "first" + note, rows, act="gelu", bias=True)
        yield _product(target, "first gated" + note, rows, pair="gate", act="silu")
        yield _product(target, "second" + note, rows, gather=False)
        yield _product(target, "input grad gated" + note, rows, pair="sum", gather=False,
                       transposed=True)
        yield _act_backward(target, "act backward" + note, rows, "gelu", False)
        yield _act_backward(target, "act backward gated" + note, rows, "silu", True)
    yield _product(target, "first float32", MANY, act="gelu", dtype="fp32")
    yield _product(target, "first TF32", MANY, act="gelu", dtype="fp32", precision="tf32")
    if _chip(target).copies_tiles:  # elsewhere the operation is left to its reference
        yield _fp8_product(target)
    for adds in (False, True):
        for second in (False, True):
            yield _weight(target, second, adds)
    yield _weight(target, False, False, cut=True)
    yield _weight(target, False, False, dtype="fp32")
    yield _weight(target, False, False, dtype="fp32", precision="tf32")


def _tile(dtype: str, *shape: int) -> str:
    return f"tensordesc<{dtype}[{', '.join(map(str, shape))}]>"


def _chip(target: str) -> Chip:
    return Chip(GPUS[target].kind, GPUS[target].processors)


def _on_matrix_units(target: str, dtype: str, precision: str) -> bool:
    """NVIDIA's multiply no float32 as it is; AMD's do."""
    return dtype != "fp32" or precision == "tf32" or GPUS[target].backend == "hip"


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "fp32" else torch.bfloat16


class _Arguments:
    """Arguments in a kernel's order: a type each, or a compile-time None."""

    def __init__(self) -> None:
        self.types: list[str] = []
        self.constants: dict[str, Any] = {}

    def add(self, *types: str) -> None:
        """Arguments of these types."""
        self.types += types

    def tiles(self, name: str, there: bool, dtype: str, *shape: int) -> None:
        """A descriptor, or None."""
        if there:
            self.types.append(_tile(dtype, *shape))
        else:
            self.constants[name] = None


def _weights_tile(t: Tiling, transposed: bool) -> tuple[int, int, int]:
    return (1, t.columns, t.depth) if transposed else (1, t.depth, t.columns)


def _product(target: str, label: str, rows: int, pair: str = "none", act: str = "none",
             gather: bool = True, bias: bool = False, transposed: bool = False,
             dtype: str = "bf16", precision: str = "ieee") -> Case:
    chip, p = _chip(target), f"*{dtype}"
    t = product_tiling(chip, _dtype(dtype), rows, 2 if pair == "gate" else 1,
                       precision=precision)
    a, copies = _Arguments(), chip.copies_tiles
    a.add(p)
    a.tiles("x_tiles", copies and not gather, dtype, t.rows, t.depth)
    a.add(p)
    a.tiles("y_tiles", copies and pair == "sum", dtype, t.rows, t.depth)
    a.add(I64, p)
    a.tiles("w_tiles", copies, dtype, *_weights_tile(t, transposed))
    a.add(p)
    a.tiles("v_tiles", copies and pair != "none", dtype, *_weights_tile(t, transposed))
    a.add(*[p] * 5, I32, I32, I32, I32, "i32", "i32", "i32", "i32")
    constants = {
        "K": 4096, "GATHER": gather, "BIAS": bias, "PAIR": pair, "ACT": act,
        "TRANSPOSED": transposed and copies, "PRECISION": precision, **_shared(t), **a.constants
    }
    # the stride that is 1 is a compile-time value, as at run time
    return _with_stride(Case(label, "product_kernel", "grouped_gemm", tuple(a.types), constants,
                             t.warps, t.stages, _on_matrix_units(target, dtype, precision),
                             copies), "stride_k" if transposed else "stride_n")


def _shared(t: Tiling) -> dict[str, Any]:
    return {"UPCAST": False, "WHILE": False, "BM": t.rows, "BN": t.columns, "BK": t.depth}


def _with_stride(case: Case, name: str) -> Case:
    """The case with one stride, the last two of three that end the types, as the constant 1."""
    types = list(case.types)
    types.pop(-1)
    return Case(case.label, case.kernel, case.module, tuple(types), {**case.constants, name: 1},
                case.warps, case.stages, case.product, case.copies)


def _act_backward(target: str, label: str, rows: int, act: str, gated: bool) -> Case:
    chip = _chip(target)
    t = product_tiling(chip, torch.bfloat16, rows, 1, extra=True)
    a, copies = _Arguments(), chip.copies_tiles
    a.add(X)
    a.constants["grad_tiles"] = None
    a.add(I64, F32, X)
    a.tiles("w_tiles", copies, "bf16", *_weights_tile(t, True))
    a.add(*[X] * 5, F32, I32, I32, I32, I32, "i32", "i32", "i32", "i32", "i32")
    constants = {
        "K": 4096, "GATHER": True, "SCALED": True, "ACT": act, "GATED": gated,
        "TRANSPOSED": copies, "PRECISION": "ieee", **_shared(t), **a.constants
    }
    return _with_stride(Case(label, "act_backward_kernel", "grouped_gemm", tuple(a.types),
                             constants, t.warps, t.stages, True, copies), "stride_k")


def _fp8_product(target: str) -> Case:
    copies = _chip(target).copies_tiles
    a, fp8, t = _Arguments(), "fp8e4nv", FP8_TILING
    a.add(f"*{fp8}")
    a.constants["x_tiles"] = None
    a.add(F32, I64, f"*{fp8}")
    a.tiles("w_tiles", copies, fp8, 1, t.columns, t.depth)
    a.add(F32, X, X, I32, I32, I32, I32, "i32", "i32", "i32", "i32")
    constants = {
        "K": 4096, "GATHER": True, "BIAS": True, "UPCAST": False, "WHILE": False, "BM": t.rows,
        "BLOCK": t.columns, **a.constants
    }
    return _with_stride(Case("fp8", "fp8_product_kernel", "fp8_products", tuple(a.types), constants,
                             t.warps, t.stages, True, copies), "stride_k")


def _weight(target: str, second: bool, adds: bool, cut: bool = False, dtype: str = "bf16",
            precision: str = "ieee") -> Case:
    chip, p = _chip(target), f"*{dtype}"
    t = weight_tiling(chip, _dtype(dtype), adds, precision)
    a, copies = _Arguments(), chip.copies_tiles
    a.add(p)
    a.tiles("x_tiles", copies and second, dtype, t.depth, t.rows)
    a.add(p)
    a.tiles("grad_tiles", copies and not second, dtype, t.depth, t.columns)
    a.add(I64, I64, F32, F32 if adds else p, F32, I32, I32, I32, I32, I64, "i32", "i32")
    constants = {
        "I": 4096, "O": 14336, "X_GATHER": not second, "G_GATHER": second, "SCALED": second,
        "UPCAST": False, "PRECISION": precision, "ADD": adds, "CUT": cut, "WHILE": False,
        "BI": t.rows, "BO": t.columns, "BR": t.depth, **a.constants
    }
    what = {"bf16": "", "fp32": " TF32" if precision == "tf32" else " float32"}[dtype]
    label = (f"weight grad {'out' if second else 'in'}{what}" + ", added" * adds +
             ", in parts" * cut)
    return Case(label, "weight_kernel", "weight_grads", tuple(a.types), constants, t.warps,
                t.stages, _on_matrix_units(target, dtype, precision), copies)


def compile_for(case: Case, target: str) -> Resources:
    """Compile one kernel for one target and read what it needs."""
    made, gpu = compiled(case, target), GPUS[target]
    registers, spilled, matrix, copies = (_nvidia(gpu, made) if gpu.backend == "cuda" else
                                          _amd(made))
    blocks = gpu.blocks(registers, made.metadata.shared, case.warps)
    return Resources(case.label, target, registers, spilled, made.metadata.shared, blocks,
                     blocks * case.warps / gpu.warps, matrix, copies)


def compiled(case: Case, target: str) -> Any:
    """What Triton's compiler makes of one kernel for one target."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"moe_plugin.kernels.gpu.{case.module}"), case.kernel)
    names = kernel.arg_names
    dynamic = [n for n in names if n not in case.constants]
    if len(dynamic) != len(case.types):
        raise ValueError(f"{case.kernel} takes {dynamic}, the case gives {len(case.types)} types")
    types, gpu = _fp8_of(target, dict(zip(dynamic, case.types, strict=True))), GPUS[target]
    source = ASTSource(
        fn=kernel, signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in case.constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items()
               if t.startswith("*") or n.startswith(("wide", "width", "stride"))})
    options = {"num_warps": case.warps, "num_stages": case.stages}
    if case.bound is not None and gpu.backend == "cuda":
        options["maxnreg"] = case.bound
    return triton.compile(source, target=GPUTarget(gpu.backend, gpu.arch, gpu.warp),
                          options=options)


def _fp8_of(target: str, types: dict[str, str]) -> dict[str, str]:
    # gfx942 has its own fp8 formats, and a GPU before sm_89 none
    other = {"gfx942": "*fp8e4b8", "sm_80": "*fp8e4b15"}.get(target)
    return {n: other if other and t == "*fp8e4nv" else t for n, t in types.items()}


def _nvidia(gpu: GPU, made: Any) -> tuple[int, int, str, bool]:
    ptx = made.asm["ptx"]
    arch = re.search(r"\.target (sm_\w+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx, encoding="utf-8")
        said = subprocess.run([
            _ptxas(gpu.arch), "-v", "--gpu-name", arch, str(path), "-o", f"{folder}/kernel.cubin"
        ], capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", said).group(1))
    spilled = sum(
        map(int,
            re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said).groups()))
    matrix = next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in ptx), "")
    return registers, spilled, matrix, "cp.async.bulk.tensor" in ptx


def _ptxas(capability: int) -> str:
    """The assembler that Triton uses: from 3.5 on it ships two, and only one reads its PTX."""
    from triton.backends.nvidia import compiler

    try:
        return compiler.get_ptxas(capability).path
    except (AttributeError, TypeError):  # before 3.5
        return str(Path(compiler.__file__).parent / "bin/ptxas")


def _amd(made: Any) -> tuple[int, int, str, bool]:
    text = made.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))

    # accumulation registers are counted among the vector registers of this architecture
    return (field("vgpr_count"), 4 * field("vgpr_spill_count"), "mfma" if "mfma" in text else "",
            False)
