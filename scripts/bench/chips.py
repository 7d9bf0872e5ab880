"""GPUs for which kernels can be compiled on a machine without a GPU, with their resources and
published peak rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.kernels.gpu.tilings import Chip


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
