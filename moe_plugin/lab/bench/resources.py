"""Registers, shared memory, spills and instructions of each Triton kernel, compiled without a GPU.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

FEW, MANY = 32, 4096  # rows of an expert
# types of kernels' arguments by name; of all others a pointer to the case's dtype
TYPES = {name: kind for kind, names in {
    "*i64": "token source position x_token grad_token ids lengths chosen ranks record",
    "*i32": "tile_group tile_row part_group part_row used ends counts before group_out row_out "
            "used_out",
    "*fp32": "scale scales w_scales weights parts dots logits lse_in lse_out importance sums "
             "grad_weights grad_importance grad_z",
    "*i1": "mask", "*fp8e4nv": "codes",
    "i32": "rows width tokens number experts length size slots blocks inner outer high wide groups "
           "height least stride_group stride_k stride_n stride_i stride_o",
}.items() for name in names.split()}


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched on one target.

    Attributes:
        module: below moe_plugin.kernels.gpu.
        constants: compile-time values.
        types: of arguments, where they are not those of `TYPES`.
        product: it multiplies matrices.
        copies: its operands are copied by tile (TMA).
        bound: of its registers per thread on NVIDIA GPUs, see
            `kernels.gpu.common.bounded_registers`.
    """

    label: str
    kernel: str
    module: str
    constants: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)
    dtype: str = "bf16"
    warps: int = 4
    stages: int = 3
    product: bool = False
    copies: bool = False
    bound: int | None = None

    def signature(self, names: Sequence[str]) -> dict[str, str]:
        """Types of the arguments with these names; compile-time values have none."""
        return {name: self.types.get(name, TYPES.get(name, f"*{self.dtype}")) for name in names
                if name not in self.constants}


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
    yield from ROW_KERNELS
    for experts in (64, 512):
        yield from _router(f"top k of {experts}", experts, 8, sigmoid=True, groups=8)
    for experts, top_k in ((8, 2), (128, 8)):
        yield from _router(f"softmax top k of {experts}", experts, top_k, sigmoid=False, groups=0)
    yield from GRADIENT_KERNELS
    yield from products(target)


_FP8 = {"LARGEST": 448.0, "SMALLEST": 2.0**-126, "ROUND": False, "BLOCK": 128}
ROW_KERNELS = (
    Case("take", "take_kernel", "rows", {"K": 2, "WEIGHTED": True, "BR": 4, "BD": 1024}),
    Case("sum", "sum_kernel", "rows", {"K": 8, "WEIGHTED": True, "BT": 4, "BD": 1024}),
    Case("dot", "dot_kernel", "rows", {"WIDTH": 4096, "K": 8, "BT": 4, "BD": 1024},
         {"out": "*fp32"}),
    Case("histogram", "histogram_kernel", "running_count", {"BLOCK": 256}),
    Case("rank", "rank_kernel", "running_count", {"BLOCK": 256, "STEP": 32}),
    Case("chunks", "chunk_kernel", "layout", {"BLOCK": 2048}, {"OUTER": "i32", "INNER": "i32"}),
    Case("write pages", "write_kernel", "pages", {"BLOCK": 2048}),
    Case("read pages", "read_kernel", "pages", {"BLOCK": 2048}),
    Case("quantize", "quantize_kernel", "fp8", {**_FP8, "BR": 16}),
    Case("dequantize", "dequantize_kernel", "fp8", {"BR": 16, "BLOCK": 128}),
    Case("quantize weights", "quantize_weights_kernel", "fp8", _FP8, warps=8),
    Case("tiles", "tile_kernel", "tiles", {"BT": 64, "BL": 64}),
)
GRADIENT_KERNELS = (
    Case("bias grad", "bias_grad_kernel", "weight_grads",
         {"GATHER": True, "SCALED": True, "BR": 64, "BO": 128}),
    Case("join", "join_kernel", "weight_grads", {"ADD": False, "BLOCK": 1024}),
)


def _router(label: str, experts: int, top_k: int, sigmoid: bool, groups: int) -> Iterator[Case]:
    """Choice of experts and its gradient: sigmoid scores with a bias in groups, or softmax."""
    shared = {"K": top_k, "MASKED": True, "NORMALIZE": True, "SIGMOID": sigmoid, "EPS": 1e-7,
              "BE": experts}
    yield Case(label, "top_k_kernel", "router",
               {**shared, "GIVEN": False, "BIASED": sigmoid, "GROUPS": groups, "TAKE": groups // 2,
                "BEST": min(2, groups), "BG": max(1, groups),
                "BT": router_tokens(experts, ROUTER_VALUES)}, dtype="fp32")
    yield Case(f"{label}, backward", "top_k_backward_kernel", "router",
               {**shared, "OF_WEIGHTS": True, "OF_IMPORTANCE": True, "OF_Z": True,
                "BT": router_tokens(experts, ROUTER_VALUES_BACKWARD)}, dtype="fp32",
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
        constants = {"GATHER": True, "BIAS": True, "BLOCK": FP8_TILING.columns}
        shape = (1, FP8_TILING.columns, FP8_TILING.depth)
        yield _multiplies(target, "fp8", "fp8_product_kernel", "fp8", FP8_TILING,
                          {"x_tiles": None, "w_tiles": shape}, constants, "stride_k",
                          dtype="fp8e4nv", types={"bias": "*bf16", "out": "*bf16"})
    for adds in (False, True):
        for second in (False, True):
            yield _weight(target, second, adds)
    yield _weight(target, False, False, cut=True)
    yield _weight(target, False, False, dtype="fp32")
    yield _weight(target, False, False, dtype="fp32", precision="tf32")


def _chip(target: str) -> Chip:
    return Chip(GPUS[target].kind, GPUS[target].processors)


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "fp32" else torch.bfloat16


def _multiplies(target: str, label: str, kernel: str, module: str, t: Tiling,
                tiles: Mapping[str, tuple[int, ...] | None], constants: dict[str, Any],
                stride: str = "", dtype: str = "bf16", precision: str = "ieee",
                types: Mapping[str, str] | None = None) -> Case:
    """A product.

    Args:
        tiles: shape of a descriptor's tile by argument, where the target copies tiles; else None.
        stride: the one that is 1, a compile-time value, as at run time.
    """
    copies = _chip(target).copies_tiles
    given = {name: f"tensordesc<{dtype}[{', '.join(map(str, shape))}]>"
             for name, shape in tiles.items() if copies and shape}
    absent = {name: None for name in tiles if name not in given}
    fixed = ({stride: 1, "K": 4096, "BM": t.rows} if stride else {}) | {
        "UPCAST": False, "WHILE": False}
    if module == "grouped_gemm":
        fixed |= {"BN": t.columns, "BK": t.depth}
    if module != "fp8":
        fixed["PRECISION"] = precision
    # NVIDIA's matrix units multiply no float32 as it is; AMD's do
    units = dtype != "fp32" or precision == "tf32" or GPUS[target].backend == "hip"
    return Case(label, kernel, module, {**fixed, **constants, **absent},
                {**given, **(types or {})}, dtype, t.warps, t.stages, units, copies)


def _weights_tile(t: Tiling, transposed: bool) -> tuple[int, int, int]:
    return (1, t.columns, t.depth) if transposed else (1, t.depth, t.columns)


def _product(target: str, label: str, rows: int, pair: str = "none", act: str = "none",
             gather: bool = True, bias: bool = False, transposed: bool = False,
             dtype: str = "bf16", precision: str = "ieee") -> Case:
    chip = _chip(target)
    t = product_tiling(chip, _dtype(dtype), rows, 2 if pair == "gate" else 1,
                       precision=precision)
    x, w = (t.rows, t.depth), _weights_tile(t, transposed)
    tiles = {"x_tiles": None if gather else x, "y_tiles": x if pair == "sum" else None,
             "w_tiles": w, "v_tiles": None if pair == "none" else w}
    constants = {"GATHER": gather, "BIAS": bias, "PAIR": pair, "ACT": act,
                 "TRANSPOSED": transposed and chip.copies_tiles}
    return _multiplies(target, label, "product_kernel", "grouped_gemm", t, tiles, constants,
                       "stride_k" if transposed else "stride_n", dtype, precision)


def _act_backward(target: str, label: str, rows: int, act: str, gated: bool) -> Case:
    chip = _chip(target)
    t = product_tiling(chip, torch.bfloat16, rows, 1, extra=True)
    constants = {"GATHER": True, "SCALED": True, "ACT": act, "GATED": gated,
                 "TRANSPOSED": chip.copies_tiles}
    return _multiplies(target, label, "act_backward_kernel", "grouped_gemm", t,
                       {"grad_tiles": None, "w_tiles": _weights_tile(t, True)}, constants,
                       "stride_k")


def _weight(target: str, second: bool, adds: bool, cut: bool = False, dtype: str = "bf16",
            precision: str = "ieee") -> Case:
    t = weight_tiling(_chip(target), _dtype(dtype), adds, precision)
    what = {"bf16": "", "fp32": " TF32" if precision == "tf32" else " float32"}[dtype]
    label = (f"weight grad {'out' if second else 'in'}{what}" + ", added" * adds +
             ", in parts" * cut)
    tiles = {"x_tiles": (t.depth, t.rows) if second else None,
             "grad_tiles": None if second else (t.depth, t.columns)}
    constants = {"I": 4096, "O": 14336, "X_GATHER": not second, "G_GATHER": second,
                 "SCALED": second, "ADD": adds, "CUT": cut, "BI": t.rows, "BO": t.columns,
                 "BR": t.depth}
    return _multiplies(target, label, "weight_kernel", "weight_grads", t, tiles, constants,
                       dtype=dtype, precision=precision, types={"out": "*fp32"} if adds else None)


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
    names, gpu = kernel.arg_names, GPUS[target]
    types = _fp8_of(target, case.signature(names))
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
