"""Compile a recorded launch without a GPU, and report its registers, shared memory and
instructions. `GPUS` contains the GPUs with their resources and published peak rates.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_plugin.kernels.gpu.tilings import Chip
from scripts.bench.launches import Launch


@dataclass(frozen=True)
class GPU:
    """A GPU model, identified by its compiler target in Triton.

    Attributes:
        kind: type of the chip, as in `kernels.gpu.tilings.Chip`.
        backend: name of the backend in Triton.
        arch: name of the architecture in Triton.
        warp: number of threads per warp.
        processors: number of multiprocessors.
        registers: number of registers per multiprocessor (NVIDIA) or per lane (AMD).
        most_registers: maximum number of registers per thread.
        shared: shared memory per multiprocessor in bytes.
        shared_block: maximum shared memory per block in bytes.
        warps: maximum number of warps per multiprocessor.
        tflops: peak rate of dense bf16 matmuls with float32 accumulation in TFLOP/s, from the
            vendor's data sheet.
        tbytes: memory bandwidth in TB/s, from the vendor's data sheet.
        fp8: whether the GPU supports the dtype e4m3fn.
    """

    name: str
    kind: str
    backend: str
    arch: int | str
    warp: int
    processors: int
    registers: int
    most_registers: int
    shared: int
    shared_block: int
    warps: int
    tflops: float
    tbytes: float
    fp8: bool = True

    @property
    def chip(self) -> Chip:
        """The chip as a `Chip`, which the tiling rules use."""
        return Chip(self.kind, self.processors)

    def blocks(self, registers: int, shared: int, warps: int) -> int:
        """Return how many blocks can run on one multiprocessor concurrently.

        Args:
            registers: number of registers per thread.
            shared: shared memory per block in bytes.
            warps: number of warps per block.
        """
        if self.backend == "hip":
            # A multiprocessor has four SIMDs with at most 8 waves each. A wave's registers are
            # allocated in multiples of 8.
            waves = 4 * min(8, self.registers // max(8, -(-registers // 8) * 8))
            by_registers = waves // warps
        else:
            # A warp's registers are allocated in multiples of 256, and the system uses 1 KiB of
            # shared memory per block.
            by_registers = self.registers // (-(-registers * 32 // 256) * 256) // warps
            shared += 1024
        by_shared = self.shared // shared if shared else by_registers
        return max(0, min(by_registers, by_shared, self.warps // warps))


_KIB = 1024
GPUS = {
    "sm_80": GPU("A100 80 GB", "ampere", "cuda", 80, 32, 108, 65536, 255, 164 * _KIB, 163 * _KIB,
                 64, 312.0, 2.04, fp8=False),
    "sm_89": GPU("L40S", "ampere", "cuda", 89, 32, 142, 65536, 255, 100 * _KIB, 99 * _KIB, 48,
                 362.0, 0.864),
    "sm_90": GPU("H200", "hopper", "cuda", 90, 32, 132, 65536, 255, 228 * _KIB, 227 * _KIB, 64,
                 989.0, 4.8),
    "sm_100": GPU("B200", "blackwell", "cuda", 100, 32, 148, 65536, 255, 228 * _KIB,
                    227 * _KIB, 64, 2250.0, 8.0),
    "sm_120": GPU("RTX 5090", "ampere", "cuda", 120, 32, 170, 65536, 255, 100 * _KIB, 99 * _KIB,
                  48, 209.5, 1.79),
    "gfx942": GPU("MI300X", "amd", "hip", "gfx942", 64, 304, 512, 512, 64 * _KIB, 64 * _KIB, 32,
                  1307.0, 5.3, fp8=False),
    "gfx950": GPU("MI355X", "amd", "hip", "gfx950", 64, 256, 512, 512, 160 * _KIB, 160 * _KIB, 32,
                  2516.0, 8.0),
}


@dataclass(frozen=True)
class Resources:
    """The resources used by a compiled kernel.

    Attributes:
        registers: number of registers per thread.
        spilled: bytes per thread that are spilled from registers to memory.
        shared: shared memory per block in bytes.
        blocks: number of blocks that can run on one multiprocessor concurrently.
        occupancy: number of warps in these blocks divided by the maximum number of warps.
        matrix: name of the matrix instruction in the assembly, or "" if there is none.
        copies: whether the kernel contains the asynchronous instruction that copies a tile.
        stages: number of pipeline stages requested.
        buffers: number of tiles of the same operand stored in shared memory. 0 if every operand has
            at most one tile in shared memory.
        through_registers: (number of wgmma instructions that read their left operand from
            registers, total number of wgmma instructions).
        gathers: whether the pipelined loop gathers the rows of an operand by index.
        turns: whether an operand may have to be transposed before it is read. Operands in tf32 may
            have to be transposed, because wgmma requires them to be contiguous along the summed
            axis.
    """

    label: str
    registers: int
    spilled: int
    shared: int
    blocks: int
    occupancy: float
    matrix: str
    copies: bool
    stages: int = 0
    buffers: int = 0
    through_registers: tuple[int, int] = (0, 0)
    gathers: bool = False
    turns: bool = False

    def failed(self, gpu: GPU) -> Iterator[str]:
        """Yield a description of each rule that the kernel violates."""
        if self.registers > gpu.most_registers:
            yield f"{self.registers} registers: at most {gpu.most_registers}"
        if self.shared > gpu.shared_block:
            yield f"{self.shared} bytes of shared memory: at most {gpu.shared_block}"
        if self.spilled:
            yield f"{self.spilled} bytes spilled"
        if self.through_registers[0]:
            yield "left operand through registers in {} of {} wgmma".format(*self.through_registers)
        # a row that is looked up needs two stages: one for its number and one for its values
        wanted = (self.stages + 1) // 2 if self.gathers else self.stages
        # wgmma and tcgen05 read a tile from its buffer; other instructions read it from registers
        wanted -= self.turns or self.matrix not in ("wgmma", "tcgen05.mma")
        if self.matrix and 0 < self.buffers < wanted:
            yield f"{self.buffers} of {self.stages} stages have a buffer"


def compile_for(launch: Launch, target: str) -> Resources:
    """Compile one launch for one target, and return the kernel's resources."""
    made, gpu = compiled(launch, target), GPUS[target]
    registers, spilled, matrix, copies = (_nvidia(gpu, made) if gpu.backend == "cuda" else
                                          _amd(made))
    options, shared = dict(launch.options), made.metadata.shared
    warps = options.get("num_warps", 4)
    blocks = gpu.blocks(registers, shared, warps)
    ptx = made.asm.get("ptx", "")
    return Resources(launch.label, registers, spilled, shared, blocks, blocks * warps / gpu.warps,
                     matrix, copies, options.get("num_stages", 0) if matrix else 0,
                     # operands that are decoded have no buffers for several stages
                     0 if "FORMAT" in dict(launch.constants) else _buffers(made.asm["ttgir"]),
                     _through_registers(ptx),
                     any(name in ("X_GATHER", "G_GATHER") and value
                         for name, value in launch.constants),
                     ("PRECISION", "tf32") in launch.constants)


def compiled(launch: Launch, target: str) -> Any:
    """Compile one launch for one target with Triton and return Triton's result."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    gpu = GPUS[target]
    kernel = getattr(importlib.import_module(f"moe_plugin.kernels.gpu.{launch.module}"),
                     launch.kernel)
    names, types, constants = kernel.arg_names, dict(launch.types), dict(launch.constants)
    if "constexprs" in inspect.signature(ASTSource).parameters:
        source = ASTSource(
            fn=kernel, signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned})
    else:  # before Triton 3.3
        from triton.backends.compiler import AttrsDescriptor

        hints = {names.index(name): 16 for name in launch.aligned}
        source = ASTSource(fn=kernel, signature=types, constants=constants,
                           attrs=AttrsDescriptor.from_hints(hints))
    options = {name: value for name, value in launch.options
               if name != "maxnreg" or gpu.backend == "cuda"}
    return triton.compile(source, target=GPUTarget(gpu.backend, gpu.arch, gpu.warp),
                          options=options)


def _buffers(ttgir: str) -> int:
    """For each pipelined operand, count the tiles in its buffer. Return the smallest number of
    tiles, or 0 if no operand is pipelined.
    """
    found = [int(count) for count in re.findall(
        r"local_alloc : \(\) -> !(?:ttg|triton_gpu|tt)\.memdesc<(\d+)x\d+x\d+x[\dx]*[a-z]",
        ttgir)]
    return min(found, default=0)


def _through_registers(ptx: str) -> tuple[int, int]:
    """Return (number of wgmma instructions with the left operand in registers, total number of
    wgmma instructions).
    """
    left = re.findall(r"wgmma\.mma_async\.[\w.]+\s*\{[^}]*\}\s*,\s*(\{|%)", ptx)
    return left.count("{"), len(left)


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
    """Return the path of the assembler (ptxas) that Triton uses.

    Since version 3.5, Triton contains two assemblers, and only one of them can read the PTX code
    for a given target.
    """
    from triton.backends.nvidia import compiler

    try:
        return compiler.get_ptxas(capability).path
    except (AttributeError, TypeError):  # before 3.5
        return str(Path(compiler.__file__).parent / "bin/ptxas")


def _amd(made: Any) -> tuple[int, int, str, bool]:
    text = made.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))

    # the count of vector registers includes the accumulation registers on this architecture
    return (field("vgpr_count"), 4 * field("vgpr_spill_count"), "mfma" if "mfma" in text else "",
            False)
